"""The options of an audit: their table, and messages about wrong ones; no torch."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gaverify.audit.job import Command, Role, tuples
from gaverify.audit.launchers import find_program
from gaverify.errors import SpecError
from gaverify.spec.options import explain_values, find_wrong, option, options_of
from gaverify.spec.values import (
    ARGUMENTS,
    COMMAND,
    FLAG,
    LONGEST_TIME,
    QUOTED,
    SECONDS,
    WORD,
    above_zero,
    seeds,
    table,
    text,
    whole,
)

RECORDED = "audit.json"
"""Name of the file in a folder of kept records that tells what was asked for."""

_VERSION = 4  # of that file, and of the records beside it
_UPDATES, _TIMEOUT = 2, 3600.0
_EVENTS = (
    "Make one run and check only the order of its calls. Exit code 0: no fault, 1: a fault, 3: no update was seen. "
    "--updates 0 checks all updates until the script ends."
)
_VARIABLES = table("K=V", WORD)
_VALUES = table("NAME=VALUE", WORD)
_LAUNCHER = "torchrun --nproc-per-node 2"
_VARIABLE, _VALUE = {"CUDA_VISIBLE_DEVICES": 0}, {"BATCH_SIZE": 4}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A script, the arguments of its two runs, and how they are made."""

    script: str | None = option(text("the path of a script", "SCRIPT", "file"), "", None, "train.py", flags="")
    """Path of the script; None: a module is run."""
    arguments: tuple[str, ...] = option(ARGUMENTS, "", (), "--data d/", flags="")
    """Arguments of every run, before the others."""
    module: str | None = option(
        text("the name of a module", "MODULE"),
        "Run `python -m MODULE` instead of a script.",
        None,
        "package.train",
        flags="-m",
    )
    """Name of the module; None: a script is run."""
    full: tuple[str, ...] | None = option(
        QUOTED, "Arguments of the full-batch run only.", None, "--batch-size 16 --accum 1"
    )
    """Arguments of the full-batch run only, after `arguments`; None: the user did not say."""
    accumulated: tuple[str, ...] | None = option(
        QUOTED, "Arguments of the accumulated run only.", None, "--batch-size 4 --accum 4"
    )
    """Arguments of the accumulated run only, after `arguments`; None: the user did not say."""
    full_script: str | None = option(
        text("the path of a script", "FILE", "file"), "Another script for the full-batch run.", None, "large.py"
    )
    """Path of another script for the full-batch run; None: the same."""
    full_env: Mapping[str, str] = option(
        _VARIABLES, "Environment variable of the full-batch run; repeatable.", dict, _VARIABLE
    )
    """Variables added to the full-batch run's environment."""
    accumulated_env: Mapping[str, str] = option(
        _VARIABLES, "Environment variable of the accumulated run; repeatable.", dict, _VARIABLE
    )
    """Variables added to the accumulated run's environment."""
    full_set: Mapping[str, str] = option(
        _VALUES, "Change a constant or a default (also argparse's) in the full-batch run; repeatable.", dict, _VALUE
    )
    """Names of values in the full-batch run's source, with what replaces them."""
    accumulated_set: Mapping[str, str] = option(
        _VALUES, "Change a constant or a default (also argparse's) in the accumulated run; repeatable.", dict, _VALUE
    )
    """Names of values in the accumulated run's source, with what replaces them."""
    both_set: Mapping[str, str] = option(
        _VALUES,
        "Change a constant or a default (also argparse's) in every run; repeatable.",
        dict,
        _VALUE,
        key="set",
    )
    """Names of values in every run's source, with what replaces them."""
    seed: int | None = option(seeds(32), "Seed Python, NumPy and torch before the script starts.", None, 0)
    """Seeds Python's, NumPy's and torch's generators before the script starts; None: no seeding."""
    updates: int = option(whole(0, "M"), f"Optimizer updates to record and compare.  [{_UPDATES}]", _UPDATES)
    """Optimizer updates that are recorded; 0 with `events_only`: the script runs to its end."""
    steps: int | None = option(
        whole(1, "K"),
        "K, backward passes per optimizer step; not the number of optimizer steps.  [detected]",
        None,
        4,
    )
    """K, the backward passes that each update should have; None: the user did not say."""
    events_only: bool = option(FLAG, _EVENTS, False, True)
    """Make one run with the common arguments; check its calls, compare no gradients."""
    tail: bool = option(FLAG, "Also check an epoch whose last accumulation window is shorter.", False, True)
    """Also audit an epoch that ends with a short window."""
    timeout: float = option(
        above_zero("a number of seconds", "S", LONGEST_TIME),
        f"Stop a run after S seconds.  [{_TIMEOUT:g}]",
        _TIMEOUT,
        600,
    )
    """Seconds until a run is ended."""
    time_limit: float | None = option(
        SECONDS,
        "Make no more runs for the search of the cause after this time; the verdict does not depend on it.",
        None,
        600,
    )
    """Seconds after which the search for the cause makes no more runs; None: no limit."""
    ranks: int | None = option(
        whole(2, "R"), "Start the accumulated run in R processes (ranks), as torchrun would.", None, 2
    )
    """Processes that train together in the accumulated run, at least 2; None: one process, or `launcher`."""
    launcher: tuple[str, ...] = option(
        COMMAND, "Command that starts the accumulated run, such as torchrun's.", (), _LAUNCHER
    )
    """Words of the command that starts the accumulated run's processes; empty: no launcher."""
    full_launcher: tuple[str, ...] = option(
        COMMAND,
        "Command that starts the full-batch run, if the script seeds by rank.  [one process]",
        (),
        _LAUNCHER,
    )
    """Words of the command that starts the full-batch run; empty: one process. For scripts that seed by rank."""
    in_place: bool = option(FLAG, "Run without the file sandbox: let the runs change your files.", False, True)
    """Let the runs write into the user's folders, as the script does without gaverify."""
    keep: str | None = option(
        text("a folder", "DIR", "dir"), "Keep the runs' records in a new folder, for --from.", None, "records/"
    )
    """Folder in which the records stay, for `read_request`; None: they are not kept."""
    name: str = option(text("a name for reports", "TEXT"), "Name in reports.", "", "nightly")
    """Name in reports; empty: the script's."""

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Request:
        """Returns the request that the values of its fields make, right or not; `check` tells what is wrong."""
        if "module" in values and "script" in values:
            # `-m MODULE -- ARGS`: the first word is no script
            values = {**values, "arguments": (values["script"], *values.get("arguments", ())), "script": None}
        return cls(**values)

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
        # A run that stands alone beside ranks is a group of one, so that the script takes the same way through it. The
        # user's own command for ranks makes the group itself.
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
            tuple((self.full_env if is_full else self.accumulated_env).items()),
            (*self.both_set.items(), *own_values.items()),
            self.seed,
            self.ranks_of(role),
        )

    def check(self) -> None:
        """Raises `SpecError` with every problem of the request."""
        problems = [*self._conflicts(), *explain_values(OPTIONS, vars(self))]
        # A value that is none of its kind has its sentence, and no other.
        wrong = {entry.name: entry.default for entry, _ in find_wrong(OPTIONS, vars(self))}
        right = replace(self, **{name: {} if default is dict else default for name, default in wrong.items()})
        problems += right._script_problems(right.target)
        if right.full_script is not None:
            problems += right._script_problems(right.full_script)
        # A problem is told before the runs: after them their time would be lost, or files of the user's overwritten.
        if right.keep is not None and os.path.lexists(right.keep):
            if not os.path.isdir(right.keep):
                problems.append(f"--keep {right.keep}: it is a file; name a new folder")
            elif os.listdir(right.keep):
                problems.append(
                    f"--keep {right.keep}: the folder is not empty, and nothing is overwritten; name a new one"
                )
        problems += right._rank_problems()
        if problems:
            raise SpecError(problems)

    def _conflicts(self) -> Iterator[str]:
        """Yields what is wrong with options that do not go together, or lack their partner."""
        # Without gradients an audit may watch the script to its end.
        if self.updates == 0 and not self.events_only:
            yield "--updates 0: record at least one update; with --events-only alone, 0 stands for all"
        has_own_run = any(
            (self.full_script is not None, self.full_env, self.accumulated_env, self.full_set, self.accumulated_set)
        )
        if self.events_only:
            if has_own_run or self.full is not None or self.accumulated is not None:
                yield (
                    "--events-only makes one run: give its arguments behind `--` and its values with --set, "
                    "not in --full or --accumulated"
                )
        elif self.is_same and self.full is None and self.accumulated is None and not has_own_run:
            yield (
                "nothing says how the two runs differ. Give the script's arguments for a large batch and for its "
                'micro-batches: --full "--batch-size 8 --accum 1" --accumulated "--batch-size 2 --accum 4"; or use '
                "--full-set, --full-env or --full-script; --events-only checks the order of calls in one run"
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


OPTIONS = options_of(Request)


def script_of(request: Request) -> str:
    """Returns the path of the script's file, or of the module's; the module's name where that is not below here."""
    if request.module is None:
        path = request.target
        return os.path.join(path, "__main__.py") if os.path.isdir(path) else path
    path = os.path.join(os.getcwd(), *request.module.split("."))
    return os.path.join(path, "__main__.py") if os.path.isdir(path) else f"{path}.py"


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
            raise SpecError(
                f"--from {folder}: another version of gaverify made these records, in a form that this one does not "
                "read; run the audit again with `--keep` and a new folder"
            )
        return Request(**{**tuples(document["request"]), "keep": folder})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"--from {folder}: it holds no records of an audit ({error}); name a folder that `--keep` wrote"
        ) from error
