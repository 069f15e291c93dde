"""What an audit is asked to do: the one table of its options, and what is wrong with them; no torch.

The command line, TOML files, the help page, messages and completion are made of the fields of `Request`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple

from gaverify.audit.job import Command, Role, tuples
from gaverify.audit.launchers import find_program
from gaverify.errors import SpecError

# The kinds of options that an audit takes: how a file's value becomes words, and words a field of `Request`.
#
# The command line and TOML files give the same words; a request is made of them in one place, with all problems at
# once.


@dataclass(frozen=True)
class Kind:
    """What an option is given: here one text, in the classes below flags, numbers, words and pairs."""

    metavar: str
    """How the help page shows it."""
    completes: Literal["", "file", "dir"] = ""
    """What the shell completes; empty: nothing."""
    missing: ClassVar[Any] = None
    """The words of an option that is left out."""

    def words_of(self, key: str, value: object, problems: list[str]) -> Any:
        """Returns the words that stand for a value of a TOML file; a sentence about a wrong one goes to `problems`."""
        if isinstance(value, list) and all(map(_is_plain, value)):
            return shlex.join(map(_word, value))
        if _is_plain(value):
            return _word(value)
        problems.append(f"$.{key}: must be text, a number or a list of them")
        return None

    def read(self, flag: str, words: Any, problems: list[str]) -> Any:
        """Returns the value of a request's field; a sentence about words that spell none goes to `problems`."""
        return words

    def check(self, flag: str, value: Any) -> str:
        """Returns what is wrong with a field's value; empty: nothing."""
        return ""


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    metavar: str = ""
    missing: ClassVar[Any] = False

    def words_of(self, key: str, value: object, problems: list[str]) -> Any:
        """Returns the value itself: the command line gives no word for a flag, either."""
        if not isinstance(value, bool):
            problems.append(f"$.{key}: must be true or false")
        return value


@dataclass(frozen=True, kw_only=True)
class Number(Kind):
    """A number."""

    example: int
    """A right number, which messages offer."""
    accepts: Callable[[float], bool]
    """Whether a number is right."""
    limits: str
    """What is wrong with a number that is not."""
    convert: Callable[[str], int | float] = int
    wanted: str = "a whole number"
    """What is wanted in place of a word that is no number."""

    def read(self, flag: str, words: Any, problems: list[str]) -> Any:
        """Returns the number."""
        try:
            return None if words is None else self.convert(words)
        except ValueError:
            problems.append(f"{flag} {words!r} is not {self.wanted}; write `{flag} {self.example}`")
            return None

    def check(self, flag: str, value: Any) -> str:
        """Returns what is wrong with a number that was given; empty: nothing."""
        if value is None or self.accepts(value):
            return ""
        return f"{flag} {f'{value:g}' if isinstance(value, float) else value}: {self.limits}"


@dataclass(frozen=True)
class Arguments(Kind):
    """The words behind the options, each by itself."""

    missing: ClassVar[Any] = ()

    def words_of(self, key: str, value: object, problems: list[str]) -> Any:
        """Splits a text as a shell does."""
        if isinstance(value, list) and all(map(_is_plain, value)):
            return tuple(map(_word, value))
        return split_words(super().words_of(key, value, problems) or "", f"$.{key}:", problems)


@dataclass(frozen=True)
class Quoted(Kind):
    """Words in one quoted text, such as the arguments of one run."""

    empty: str = ""
    """What is wrong with a text without words; empty: nothing."""

    def read(self, flag: str, words: Any, problems: list[str]) -> Any:
        """Returns the words; None where the option is left out."""
        if words is None:
            return None
        # An empty text is right for `--full` (no more arguments), but no command for `--launcher`.
        if self.empty and not words.strip():
            problems.append(f"{flag} is empty; {self.empty.format(flag=flag)}")
        return split_words(words, flag, problems)


@dataclass(frozen=True)
class Assignments(Kind):
    """NAME=VALUE, repeatable; a table in files."""

    example: str = ""
    missing: ClassVar[Any] = ()

    def words_of(self, key: str, value: object, problems: list[str]) -> Any:
        """Returns a word for each entry of the table."""
        if not isinstance(value, dict) or not all(map(_is_plain, value.values())):
            problems.append(f"$.{key}: must be a table of names and values; write `{key} = {{ NAME = 4 }}`")
            return ()
        return tuple(f"{name}={_word(item)}" for name, item in value.items())

    def read(self, flag: str, words: Any, problems: list[str]) -> Any:
        """Returns the pairs."""
        pairs: dict[str, str] = {}
        for word in words:
            name, sign, value = word.partition("=")
            if not sign or not name or "\0" in word:  # no variable of a process may hold a zero byte
                problems.append(f"{flag} {word!r} has no name and value; write `{flag} {self.example}`")
            # The later value would win without a word, and the run would not be the one that was meant.
            elif name in pairs:
                problems.append(f"{flag} gives `{name}` twice: {pairs[name]!r} and {value!r}")
            else:
                pairs[name] = value
        return tuple(pairs.items())


class Option(NamedTuple):
    """What is known of one field of `Request`.

    Args:
        kind: What it is given.
        help: What the help page says.
        flags: How the command line calls it; empty: an argument of the command.
    """

    kind: Kind
    help: str
    flags: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The name that messages use; empty for an argument."""
        return self.flags[-1] if self.flags else ""


def option(kind: Kind, help: str, *flags: str, default: Any = None) -> Any:
    """Returns a field of `Request` that the command line and files can set."""
    return field(default=default, metadata={"option": Option(kind, help, flags)})


def split_words(text: str, place: str, problems: list[str]) -> tuple[str, ...]:
    """Returns the arguments that a text holds, as a shell would split it.

    Args:
        text: The arguments.
        place: Where they stand, for messages.
        problems: Gets a sentence about a quote that is not closed; then there are no arguments.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        problems.append(f"{place} {text!r} cannot be split into arguments: {error}")
        return ()


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, int, float))


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)  # TOML writes `true`, Python `True`


# What an audit is asked to do: the one table of its options, and what is wrong with them; no torch.


RECORDED = "audit.json"
"""Name of the file in a folder of kept records that tells what was asked for."""

_VERSION = 2  # of that file
_UPDATES, _TIMEOUT = 2, 3600.0
_EVENTS = (
    "Make one run and check only the order of its calls. Exit code 0: no fault, 1: a fault, 3: no update was seen. "
    "--updates 0 checks all updates until the script ends."
)
_SEED = "give a whole number from 0 to 2^32 - 1, the range of NumPy"
_RANKS = "an audit runs one process without this option; write 2 or more"
_VARIABLES = Assignments("K=V", example="CUDA_VISIBLE_DEVICES=0")
_VALUES = Assignments("NAME=VALUE", example="BATCH_SIZE=4")
_LAUNCHER = Quoted('"WORDS"', empty='write a command, such as {flag} "torchrun --nproc-per-node 2"')


@dataclass(frozen=True, kw_only=True)
class Request:
    """A script, the arguments of its two runs, and how they are made."""

    script: str | None = option(Kind("SCRIPT", "file"), "")
    """Path of the script; None: a module is run."""
    arguments: tuple[str, ...] = option(Arguments("[-- ARGS]"), "", default=())
    """Arguments of every run, before the others."""
    module: str | None = option(Kind("MODULE"), "Run `python -m MODULE` instead of a script.", "-m")
    """Name of the module; None: a script is run."""
    full: tuple[str, ...] | None = option(Quoted('"ARGS"'), "Arguments of the full-batch run only.", "--full")
    """Arguments of the full-batch run only, after `arguments`; None: the user did not say."""
    accumulated: tuple[str, ...] | None = option(
        Quoted('"ARGS"'), "Arguments of the accumulated run only.", "--accumulated"
    )
    """Arguments of the accumulated run only, after `arguments`; None: the user did not say."""
    full_script: str | None = option(Kind("FILE", "file"), "Another script for the full-batch run.", "--full-script")
    """Path of another script for the full-batch run; None: the same."""
    full_env: tuple[tuple[str, str], ...] = option(
        _VARIABLES, "Environment variable of the full-batch run; repeatable.", "--full-env", default=()
    )
    """(variable, value) pairs added to the full-batch run's environment."""
    accumulated_env: tuple[tuple[str, str], ...] = option(
        _VARIABLES, "Environment variable of the accumulated run; repeatable.", "--accumulated-env", default=()
    )
    """(variable, value) pairs added to the accumulated run's environment."""
    full_set: tuple[tuple[str, str], ...] = option(
        _VALUES,
        "Change a constant or a default (also argparse's) in the full-batch run; repeatable.",
        "--full-set",
        default=(),
    )
    """(name, replacement) pairs for values in the full-batch run's source."""
    accumulated_set: tuple[tuple[str, str], ...] = option(
        _VALUES,
        "Change a constant or a default (also argparse's) in the accumulated run; repeatable.",
        "--accumulated-set",
        default=(),
    )
    """(name, replacement) pairs for values in the accumulated run's source."""
    both_set: tuple[tuple[str, str], ...] = option(
        _VALUES, "Change a constant or a default (also argparse's) in every run; repeatable.", "--set", default=()
    )
    """(name, replacement) pairs for values in every run's source."""
    seed: int | None = option(
        Number("N", example=0, accepts=lambda seed: 0 <= seed < 2**32, limits=_SEED),
        "Seed Python, NumPy and torch before the script starts.",
        "--seed",
    )
    """Seeds Python's, NumPy's and torch's generators before the script starts; None: no seeding."""
    updates: int = option(
        Number("M", example=2, accepts=lambda updates: updates >= 1, limits="record at least one update"),
        f"Optimizer updates to record and compare.  [{_UPDATES}]",
        "--updates",
        default=_UPDATES,
    )
    """Optimizer updates that are recorded; 0 with `events_only`: the script runs to its end."""
    steps: int | None = option(
        Number("K", example=1, accepts=lambda steps: steps >= 1, limits="K is at least 1"),
        "K, backward passes per optimizer step; not the number of optimizer steps.  [detected]",
        "--steps",
    )
    """K, the backward passes that each update should have; None: the user did not say."""
    events_only: bool = option(Flag(), _EVENTS, "--events-only", default=False)
    """Make one run with the common arguments; check its calls, compare no gradients."""
    tail: bool = option(
        Flag(), "Also check an epoch whose last accumulation window is shorter.", "--tail", default=False
    )
    """Also audit an epoch that ends with a short window."""
    timeout: float = option(
        Number(
            "S",
            example=600,
            accepts=lambda seconds: seconds > 0,
            limits="give a positive number of seconds",
            convert=float,
            wanted="a number of seconds",
        ),
        f"Stop a run after S seconds.  [{_TIMEOUT:g}]",
        "--timeout",
        default=_TIMEOUT,
    )
    """Seconds until a run is ended."""
    ranks: int | None = option(
        Number("R", example=2, accepts=lambda ranks: ranks >= 2, limits=_RANKS),
        "Start the accumulated run in R processes (ranks), as torchrun would.",
        "--ranks",
    )
    """Processes that train together in the accumulated run, at least 2; None: one process, or `launcher`."""
    launcher: tuple[str, ...] = option(
        _LAUNCHER, "Command that starts the accumulated run, such as torchrun's.", "--launcher", default=()
    )
    """Words of the command that starts the accumulated run's processes; empty: no launcher."""
    full_launcher: tuple[str, ...] = option(
        _LAUNCHER,
        "Command that starts the full-batch run, if the script seeds by rank.  [one process]",
        "--full-launcher",
        default=(),
    )
    """Words of the command that starts the full-batch run; empty: one process. For scripts that seed by rank."""
    in_place: bool = option(
        Flag(), "Run without the file sandbox: let the runs change your files.", "--in-place", default=False
    )
    """Let the runs write into the user's folders, as the script does without gaverify."""
    keep: str | None = option(Kind("DIR", "dir"), "Keep the runs' records in a new folder, for --from.", "--keep")
    """Folder in which the records stay, for `read_request`; None: they are not kept."""
    name: str = option(Kind("TEXT"), "Name in reports.", "--name", default="")
    """Name in reports; empty: the script's."""
    problems: tuple[str, ...] = field(default=(), compare=False)
    """Sentences about words that spell no value; empty: none."""

    @classmethod
    def from_words(cls, words: Mapping[str, Any]) -> Request:
        """Returns the request that the words of the command line spell, by the names of the fields.

        `check` reports problems of these words together with all other problems.
        """
        problems: list[str] = []
        values = {name: entry.kind.read(entry.flag, words[name], problems) for name, entry in OPTIONS.items()}
        if values["module"] is not None and values["script"] is not None:
            # `-m MODULE -- ARGS`: the first word is no script
            values |= {"arguments": (values["script"], *values["arguments"]), "script": None}
        return cls(**{name: value for name, value in values.items() if value is not None}, problems=tuple(problems))

    @property
    def target(self) -> str:
        """The script or the module."""
        return self.module or self.script or ""

    @property
    def is_same(self) -> bool:
        """Whether both runs would be the same."""
        return (
            (self.full or ()) == (self.accumulated or ())
            and self.full_script is None
            and (self.full_env, self.full_set) == (self.accumulated_env, self.accumulated_set)
            # Ranks share the batch, so that equal arguments make another run with them.
            and self.ranks is None
            and self.launcher == self.full_launcher
        )

    @property
    def has_ranks(self) -> bool:
        """Whether the accumulated run trains in several processes."""
        return self.ranks is not None or bool(self.launcher)

    def launcher_of(self, role: Role) -> tuple[str, ...]:
        """Returns the words of the command that starts the run of a role; empty where gaverify runs the script."""
        if not self.launcher:
            return ()
        return (self.full_launcher or ("python",)) if role == "full" else self.launcher

    def ranks_of(self, role: Role) -> int:
        """Returns how many ranks gaverify's own launcher starts for the run of a role; 0: it is not used."""
        if role != "full":
            return self.ranks or 0
        # A run that stands alone beside ranks is a group of one, so that the script takes the same way through it. One
        # that a command of the user's for ranks starts makes its group itself.
        launched = bool(self.launcher) and self.launcher_of(role) in (self.launcher, self.full_launcher)
        return int(self.has_ranks and not launched)

    def command_of(self, role: Role) -> Command:
        """Returns how the run of a role is started."""
        is_full = role == "full"
        own_arguments = {"full": self.full, "accumulated": self.accumulated, "events": ()}[role] or ()
        own_values = self.full_set if is_full else self.accumulated_set
        return Command(
            (self.full_script if is_full else None) or self.target,
            self.module is not None,
            (*self.arguments, *own_arguments),
            self.launcher_of(role),
            self.full_env if is_full else self.accumulated_env,
            (*self.both_set, *own_values),
            self.seed,
            self.ranks_of(role),
        )

    def check(self) -> None:
        """Raises `SpecError` with every problem of the request."""
        problems = [*self._conflicts(), *self.problems, *self._script_problems(self.target)]
        if self.full_script is not None:
            problems += self._script_problems(self.full_script)
        # without gradients an audit may watch the script to its end
        values = {**vars(self), "updates": self.updates or 1} if self.events_only else vars(self)
        problems += filter(None, (entry.kind.check(entry.flag, values[name]) for name, entry in OPTIONS.items()))
        # Told before the runs: after them their time would be lost, or files of the user's overwritten.
        if self.keep is not None and os.path.lexists(self.keep):
            if not os.path.isdir(self.keep):
                problems.append(f"--keep {self.keep}: it is a file; name a new folder")
            elif os.listdir(self.keep):
                problems.append(
                    f"--keep {self.keep}: the folder is not empty, and nothing is overwritten; name a new one"
                )
        problems += self._rank_problems()
        if problems:
            raise SpecError(problems)

    def _conflicts(self) -> Iterator[str]:
        """Yields what is wrong with options that do not go together, or lack their partner."""
        has_own_run = any(
            (self.full_script is not None, self.full_env, self.accumulated_env, self.full_set, self.accumulated_set)
        )
        if self.events_only:
            if has_own_run or self.full is not None or self.accumulated is not None:
                yield (
                    "--events-only makes one run: give its arguments behind `--` and its values with --set, "
                    "not in --full or --accumulated"
                )
        elif not has_own_run:
            if self.full is None and self.accumulated is not None:
                yield "--full is missing: the arguments that make the large batch, without accumulation"
            if self.accumulated is None and self.full is not None:
                yield "--accumulated is missing: the arguments that cut the same batch into micro-batches"

    def _rank_problems(self) -> list[str]:
        problems = []
        # under a launcher the script would wait for the other ranks until the timeout
        world = os.environ.get("WORLD_SIZE", "1")
        if not self.has_ranks and world.isdigit() and int(world) > 1:
            problems.append(
                f"WORLD_SIZE={world} is set in the environment, as under a launcher: the script would wait for "
                f"{int(world) - 1} more. Unset RANK and WORLD_SIZE, or let gaverify start the processes: "
                f'--ranks {world}, or --launcher "torchrun --nproc-per-node {world}"'
            )
        if self.has_ranks and self.events_only:
            option = "--launcher" if self.launcher else "--ranks"
            problems.append(
                f"--events-only cannot be combined with {option}, which compares gradients; leave out --events-only"
            )
        if self.launcher and self.ranks is not None:
            problems.append("--launcher and --ranks: the launcher decides how many processes there are; leave one out")
        if self.full_launcher and not self.launcher:
            problems.append("--full-launcher needs --launcher, the command of the accumulated run; add it")
        changed = [name for name, _ in (*self.both_set, *self.full_set, *self.accumulated_set)]
        # A launcher starts the script itself, so that no source can be changed before it is compiled.
        if self.launcher and changed:
            problems.append(
                f"--launcher: `{changed[0]}` cannot be changed in the source of processes that a launcher starts; use "
                "arguments (--full, --accumulated) or variables (--full-env, --accumulated-env)"
            )
        for name, words in (("--launcher", self.launcher), ("--full-launcher", self.full_launcher)):
            if words:
                try:
                    find_program(words[0], name)
                except SpecError as error:
                    problems += error.problems
        return problems

    def _script_problems(self, script: str) -> list[str]:
        if self.module is not None:
            try:
                # the package alone: `find_spec` would import the parents of a module in it
                is_importable = script and importlib.util.find_spec(script.split(".")[0]) is not None
            except (ImportError, ValueError):
                is_importable = False
            path = os.path.join(os.getcwd(), *script.split("."))
            if is_importable or os.path.exists(path + ".py") or os.path.isdir(path):
                return []
            return [f"there is no module `{script}`; `-m` looks in `{os.getcwd()}` and in the installed packages"]
        if os.path.isfile(script):
            return []
        if os.path.isdir(script) and os.path.exists(os.path.join(script, "__main__.py")):
            return []
        what = "is a folder without `__main__.py`" if os.path.isdir(script) else "does not exist"
        return [f"the script `{script}` {what}; give its path as for `python FILE`, or write `-m package.module`"]


OPTIONS: dict[str, Option] = {entry.name: entry.metadata["option"] for entry in fields(Request) if entry.metadata}


def encode_request(request: Request) -> str:
    """Returns a request as JSON, for `read_request`."""
    return json.dumps({"version": _VERSION, "request": asdict(request)}, indent=2)


def read_request(folder: str) -> Request:
    """Returns the request whose records a folder keeps.

    Raises:
        SpecError: The folder holds none.
    """
    path = os.path.join(folder, RECORDED)
    try:
        with open(path, encoding="utf-8") as stream:
            document = json.load(stream)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']}")
        return Request(**{**tuples(document["request"]), "keep": folder})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"--from {folder}: it holds no records of an audit ({error}); name a folder that `--keep` wrote"
        ) from error
