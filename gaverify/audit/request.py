"""What an audit is asked to do, in words and numbers; no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from dataclasses import asdict, dataclass, field

from gaverify.audit.job import Command, Role, tuples
from gaverify.audit.launchers import find_program
from gaverify.errors import SpecError
from gaverify.rules.wording import phrase

RECORDED = "audit.json"
"""Name of the file in a folder of kept records that tells what was asked for."""


@dataclass(frozen=True)
class Setting:
    """What one run alone is given besides its arguments.

    Args:
        script: Another script than the common one.
        environment: Variables and their values.
        values: Names in the source, and the words to put there.
    """

    script: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    values: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Request:
    """A script, the arguments of its two runs, and how they are made."""

    script: str
    """Path of the script, or the module's name with `module`."""
    full: tuple[str, ...] = ()
    """Arguments of the full-batch run only, after `common`."""
    accumulated: tuple[str, ...] = ()
    """Arguments of the accumulated run only, after `common`."""
    common: tuple[str, ...] = ()
    """Arguments of every run, before the others."""
    module: bool = False
    """Run as `python -m script`."""
    updates: int = 2
    """Optimizer updates that are recorded; 0 with `events_only`: the script runs to its end."""
    events_only: bool = False
    """Make one run with the common arguments; check its calls, compare no gradients."""
    steps: int | None = None
    """K, the backward passes that each update should have; None: the user did not say."""
    timeout: float = 3600.0
    """Seconds until a run is ended."""
    full_setting: Setting = Setting()
    """Script, environment and source values of the full-batch run only."""
    accumulated_setting: Setting = Setting()
    """Script, environment and source values of the accumulated run, or of the only run with `events_only`."""
    seed: int | None = None
    """Seeds Python's, NumPy's and torch's generators before the script starts; None: no seeding."""
    keep: str | None = None
    """Folder in which the records stay, for `read_request`; None: they are not kept."""
    in_place: bool = False
    """Let the runs write into the user's folders, as the script does without gaverify."""
    ranks: int | None = None
    """Processes that train together in the accumulated run, at least 2; None: one process, or `launcher`."""
    launcher: tuple[str, ...] = ()
    """Words of the command that starts the accumulated run's processes; empty: no launcher."""
    full_launcher: tuple[str, ...] = ()
    """Words of the command that starts the full-batch run; empty: one process. For scripts that seed by rank."""
    tail: bool = False
    """Also audit an epoch that ends with a short window."""
    problems: tuple[str, ...] = field(default=(), compare=False)
    """Sentences about conflicting options, found before the request was made; empty: none."""

    @property
    def same(self) -> bool:
        """Whether both runs would be the same."""
        return (
            self.full == self.accumulated
            and self.full_setting == self.accumulated_setting
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

    def command_of(self, role: Role) -> Command:
        """Returns how the run of a role is started."""
        setting = self.full_setting if role == "full" else self.accumulated_setting
        arguments = {"full": self.full, "accumulated": self.accumulated, "events": ()}[role]
        return Command(
            setting.script or self.script,
            self.module,
            (*self.common, *arguments),
            self.launcher_of(role),
            setting.environment,
            setting.values,
            self.seed,
        )

    def check(self) -> None:
        """Raises `SpecError` with every problem of the request."""
        problems = [*self.problems, *self._script_problems(self.script)]
        if self.full_setting.script is not None:
            problems += self._script_problems(self.full_setting.script)
        if self.updates < (0 if self.events_only else 1):
            problems.append(phrase("request.updates", updates=self.updates))
        if self.steps is not None and self.steps < 1:
            problems.append(phrase("request.steps", steps=self.steps))
        if not self.timeout > 0:
            problems.append(phrase("request.timeout", timeout=self.timeout))
        if self.seed is not None and not 0 <= self.seed < 2**32:
            problems.append(phrase("request.seed", seed=self.seed))
        if self.keep is not None and os.path.lexists(self.keep):
            if not os.path.isdir(self.keep):
                problems.append(phrase("request.keep-file", keep=self.keep))
            elif os.listdir(self.keep):
                problems.append(phrase("request.keep-full", keep=self.keep))
        problems += self._rank_problems()
        if problems:
            raise SpecError(problems)

    def _rank_problems(self) -> list[str]:
        option = "--launcher" if self.launcher else "--ranks"
        problems = []
        if self.ranks is not None and self.ranks < 2:
            problems.append(phrase("request.ranks", ranks=self.ranks))
        world = os.environ.get("WORLD_SIZE", "1")
        if not self.has_ranks and world.isdigit() and int(world) > 1:
            problems.append(phrase("request.world", world=world, others=int(world) - 1))
        if self.has_ranks and self.events_only:
            problems.append(phrase("request.events", option=option))
        if self.launcher and self.ranks is not None:
            problems.append(phrase("request.both"))
        if self.full_launcher and not self.launcher:
            problems.append(phrase("request.full-launcher"))
        changed = [name for name, _ in (*self.full_setting.values, *self.accumulated_setting.values)]
        if self.launcher and changed:
            problems.append(phrase("request.values", name=changed[0]))
        for name, words in (("--launcher", self.launcher), ("--full-launcher", self.full_launcher)):
            if words:
                try:
                    find_program(words[0], name)
                except SpecError as error:
                    problems += error.problems
        return problems

    def _script_problems(self, script: str) -> list[str]:
        if self.module:
            try:
                is_importable = script and importlib.util.find_spec(script.split(".")[0]) is not None
            except (ImportError, ValueError):
                is_importable = False
            path = os.path.join(os.getcwd(), *script.split("."))
            if is_importable or os.path.exists(path + ".py") or os.path.isdir(path):
                return []
            return [phrase("request.no-module", script=script, folder=os.getcwd())]
        if os.path.isfile(script):
            return []
        if os.path.isdir(script) and os.path.exists(os.path.join(script, "__main__.py")):
            return []
        kind = "a folder without `__main__.py`" if os.path.isdir(script) else "not there"
        return [phrase("request.no-script", script=script, kind=kind)]


def encode_request(request: Request) -> str:
    """Returns a request as JSON, for `read_request`."""
    return json.dumps({"version": 1, "request": asdict(request)}, indent=2)


def read_request(folder: str) -> Request:
    """Returns the request whose records a folder keeps.

    Raises:
        SpecError: The folder holds none.
    """
    path = os.path.join(folder, RECORDED)
    try:
        with open(path, encoding="utf-8") as stream:
            document = json.load(stream)
        if document["version"] != 1:
            raise ValueError(f"version {document['version']}")
        fields = tuples(document["request"])
        settings = {name: Setting(**fields[name]) for name in ("full_setting", "accumulated_setting")}
        return Request(**{**fields, **settings, "keep": folder})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(phrase("request.no-records", folder=folder, error=error)) from error


def words(text: str, option: str) -> tuple[str, ...]:
    """Returns the arguments that a quoted string holds, as a shell would split it.

    Raises:
        SpecError: A quote is not closed.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise SpecError(phrase("request.words", option=option, text=text, error=error)) from error
