"""The processes that run the user's script: as `python script.py` would, with the recorder in place.

A process that a launcher starts is recorded from the moment it has imported torch. It may be a rank, the launcher's own
agent, a parent of ranks, or a worker of a data loader. Only processes that step leave a closing record.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
import traceback
import types
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from gaverify.audit.editing import PLACED, Edits
from gaverify.audit.folders import ERROR, SCRIPT_FAILED, folder_for, note_fault, note_rank
from gaverify.audit.job import Command, Job
from gaverify.audit.launchers import entry_variables, find_program, start_ranks
from gaverify.children.last_words import cause_of
from gaverify.children.ranks import torchrun_variables
from gaverify.errors import LONGEST_TEXT, ProblemError, cut_text
from gaverify.records.events import Ending

if TYPE_CHECKING:
    from gaverify.audit.recording.recorder import Recorder

_WITH_VALUES = str(Path(__file__).with_name("entrance") / "script_with_values.py")
_entered: list[Job] = []
"""The launcher's job that this process has entered, if it has."""


def main(path: str) -> NoReturn:
    """Runs the job in the file `path` and ends the process."""
    job = Job.read(Path(path))
    folder = Path(job.folder)
    try:
        if job.files == "view":
            _enter_view(job, folder)  # before torch starts threads: a private view needs a process with one
    except BaseException as error:
        _give_up(error, folder)
    if job.command.launcher:
        _launch(job, Path(path))
    try:
        if job.command.ranks:
            folder = start_ranks(folder, job.command.ranks, job.port)  # from here on this process is one of them
            job = replace(job, folder=str(folder))
        recorder = install_recorder(job, folder)
    except BaseException as error:
        _give_up(error, folder)
    recorder.finish(*_run_to_end(job.command, folder))
    raise AssertionError("the recorder ends the process")


def _run_to_end(command: Command, folder: Path) -> tuple[Ending, int, str]:
    """Runs the script; returns why it ended, the status for this process, and what the script gave `sys.exit`."""
    reason, status, code = Ending.SCRIPT, 0, ""
    try:
        edits = Edits(command.values, command.script if command.module else "", folder / PLACED)
        if edits.missing_names:
            edits.install()
        _seed(command.seed)
        _run(command, edits)
    except ProblemError as error:
        _write_error(folder, f"{error}\n")
        os._exit(SCRIPT_FAILED)
    except SystemExit as error:
        reason, code = Ending.EXIT, repr(error.code)
        if error.code not in (None, 0):
            status = SCRIPT_FAILED
            _write_error(folder, f"it called sys.exit({error.code!r})")
    except BaseException as error:
        _write_failure(error, folder)
        reason, status = Ending.ERROR, SCRIPT_FAILED
    return reason, status, code


def _enter_view(job: Job, folder: Path) -> None:
    """Gives this process, and what it starts, files whose changes go with the run."""
    from gaverify.audit.outputs import IMPOSSIBLE, enter, shared_folders

    needed = [Path.cwd()] if job.command.module else [Path.cwd(), Path(job.command.script).resolve().parent]
    devices = {path: os.stat(path).st_dev for path, _ in job.command.patched}
    reason = enter(folder, shared_folders(), needed)
    if reason:
        with contextlib.suppress(OSError):  # a view that failed halfway may hide the folder
            (folder / "no-view.txt").write_text(reason, encoding="utf-8")
        os._exit(IMPOSSIBLE)
    if not job.command.patched:
        return
    from gaverify.patches.sources import encode_source

    for path, text in job.command.patched:
        status = os.stat(path)
        # A covered file lies on the overlay's own device. Any other would be the user's, which no trial may change.
        if status.st_dev == devices[path]:
            _write_error(folder, f"`{path}` lies outside of the folders that a run sees a copy of")
            os._exit(SCRIPT_FAILED)
        Path(path).write_bytes(encode_source(text))
        # Bytecode of the unpatched source is told by the second in which that was written.
        os.utime(path, (status.st_atime + 2, status.st_mtime + 2))


def _launch(job: Job, path: Path) -> NoReturn:
    """Replaces this process by the launcher; every Python that it starts records itself."""
    command, (first, *words) = job.command, job.command.launcher
    script = [*(["-m"] if command.module else []), command.script] if not command.values else [_WITH_VALUES]
    words = [find_program(first), *words, *script, *command.arguments]
    os.environ |= entry_variables(path, os.environ)
    if command.ranks:
        os.environ |= torchrun_variables(0, command.ranks, job.port)
    os.execv(words[0], words)


def _give_up(error: BaseException, folder: Path) -> NoReturn:
    """Ends this process for a fault of gaverify, or for a full disk."""
    os._exit(note_fault(error, folder))


def _write_error(folder: Path, text: str) -> None:
    """Writes how the script failed, with long lines cut; ends this process if the disk has no room for that."""
    text = "\n".join(line if len(line) <= LONGEST_TEXT else cut_text(line) for line in text.splitlines())
    try:
        (folder / ERROR).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        _give_up(error, folder)


def _write_failure(error: BaseException, folder: Path) -> None:
    """Writes why the script failed; ends this process if the recorder failed."""
    from gaverify.tracebacks import ends_in_call

    frames = traceback.extract_tb(error.__traceback__)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    # The last frame tells who raised: torch and the script, called by the recorder, have frames of their own. A source
    # with wrong syntax has none, and is compiled in this file.
    last = frames[-1].filename if frames and not isinstance(error, SyntaxError) else ""
    if last.startswith(package) and last != __file__ and not ends_in_call(error):
        _give_up(error, folder)
    _write_error(folder, f"{cause_of(error)}\n{_format_traceback(error)}")


def install_recorder(job: Job, folder: Path) -> Recorder:
    """Puts a recorder with the run's changes between the script and torch, and returns it."""
    from gaverify.audit.recording.recorder import Recorder, install
    from gaverify.audit.recording.storage import Storage
    from gaverify.tracebacks import set_home

    recorder, command = Recorder(job, Storage(folder)), job.command
    for change in job.changes:  # before the patches, which ask the recorder what they replace
        change.install(recorder)
    install(recorder)
    set_home(os.getcwd() if command.module else os.path.dirname(os.path.abspath(command.script)))
    return recorder


def _seed(seed: int | None) -> None:
    """Seeds Python's generator, NumPy's and torch's, as scripts do to be repeatable; None: seeds none."""
    if seed is None:
        return
    import importlib.util
    import random

    import torch

    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)


def _run(command: Command, edits: Edits) -> None:
    if command.module:
        _first_on_path(os.getcwd())
        sys.argv = [command.script, *command.arguments]
        runpy.run_module(command.script, run_name="__main__", alter_sys=True)
        return
    script = os.path.abspath(command.script)
    # As Python does: the folder of the file that a link leads to, and not the link's own.
    _first_on_path(os.path.dirname(os.path.realpath(script)))
    sys.argv = [command.script, *command.arguments]
    if os.path.isdir(script):
        runpy.run_path(script, run_name="__main__")
        return
    # Not runpy.run_path: it removes the module in the end, and functions of the script could not be pickled.
    main = types.ModuleType("__main__")
    main.__file__ = script
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    with open(script, "rb") as stream:
        source = stream.read()
    code = edits.script(source, script) if edits.missing_names else compile(source, script, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _format_traceback(error: BaseException) -> str:
    """Returns the traceback without frames before the script, and without libraries' if the script has frames."""
    from gaverify.tracebacks import Owner, owner_of

    trace = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = trace
    while part is not None:
        user_frames = [frame for frame in part.stack if owner_of(frame.filename) is Owner.USER]
        last = part.stack[-1:] if part.stack and part.stack[-1] not in user_frames else []
        part.stack = traceback.StackSummary.from_list([*user_frames, *last] if user_frames else [])
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return "".join(trace.format()).rstrip()


def enter(path: str) -> None:
    """Records this process from here on, which a launcher has started; `path` is the file of the launcher's job."""
    run_job = Job.read(Path(path))
    try:
        folder = folder_for(Path(run_job.folder), os.getpid())
    except OSError as error:
        _give_up(error, Path(run_job.folder))
    job = replace(run_job, folder=str(folder))
    _entered.append(job)
    try:
        recorder = install_recorder(job, folder)
        _seed(job.command.seed)
    except BaseException as error:
        _give_up(error, folder)
    _report_failures(folder)
    atexit.register(_close_record, recorder, os.getpid())


def run_with_values() -> None:
    """Runs the script of the launcher's job with its values, and with the arguments that the launcher gave."""
    job = _entered[0]
    command = replace(job.command, arguments=tuple(sys.argv[1:]))
    edits = Edits(command.values, command.script if command.module else "", Path(job.folder) / PLACED)
    edits.install()
    _run(command, edits)


def _report_failures(folder: Path) -> None:
    original, process = sys.excepthook, os.getpid()

    def note_failure(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        # Processes that the script forks inherit this hook: their failures are not this process's.
        if os.getpid() == process and not isinstance(error, KeyboardInterrupt):
            from gaverify.audit.recording.values import place_in_group

            _write_failure(error, folder)
            note_rank(folder, *place_in_group())
        original(kind, error, frames)

    sys.excepthook = note_failure


def _close_record(recorder: Recorder, process: int) -> None:
    """Writes the closing record of a process that ends before all updates are made; its exit status stays."""
    if os.getpid() == process and recorder.windows.steps and not (recorder.storage.folder / ERROR).exists():
        try:
            recorder.close(Ending.SCRIPT)
        except Exception as error:
            _give_up(error, recorder.storage.folder)
