"""The process that runs the user's script: as `python script.py` would, with the recorder in place."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gaverify.audit.job import RECORDER_FAILED, SCRIPT_FAILED, Job

if TYPE_CHECKING:
    from gaverify.audit.recording.recorder import Recorder


def main(path: str) -> NoReturn:
    """Runs the job in the file `path` and ends the process."""
    job = Job.read(Path(path))
    folder = Path(job.folder)
    if job.eager:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    try:
        recorder = _installed(job, folder)
    except BaseException:
        _give_up(folder)
    reason, status = "script", 0
    try:
        _run(job)
    except SystemExit as error:
        reason = f"exit {error.code!r}"
        if error.code not in (None, 0):
            status = SCRIPT_FAILED
            (folder / "error.txt").write_text(f"the script left Python with sys.exit({error.code!r})", encoding="utf-8")
    except BaseException as error:
        if _is_ours(error):
            _give_up(folder)
        reason, status = "error", SCRIPT_FAILED
        (folder / "error.txt").write_text(_trimmed(error), encoding="utf-8")
    _end(recorder, reason, status)


def _give_up(folder: Path) -> NoReturn:
    (folder / "internal.txt").write_text(traceback.format_exc(), encoding="utf-8")
    os._exit(RECORDER_FAILED)


def _is_ours(error: BaseException) -> bool:
    """Whether the recorder raised it: what torch or the script raise in a recorded call ends in their own frames."""
    frames = traceback.extract_tb(error.__traceback__)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    return bool(frames) and frames[-1].filename.startswith(package) and frames[-1].filename != __file__


def _installed(job: Job, folder: Path) -> Recorder:
    from gaverify.audit.recording.patches import install
    from gaverify.audit.recording.places import set_home
    from gaverify.audit.recording.recorder import Recorder
    from gaverify.audit.recording.storage import Storage

    recorder = Recorder(job, Storage(folder))
    install(recorder)
    set_home(os.getcwd() if job.module else os.path.dirname(os.path.abspath(job.script)))
    return recorder


def _end(recorder: Recorder, reason: str, status: int) -> NoReturn:
    recorder.finish(reason, status)
    raise AssertionError("the recorder ends the process")


def _run(job: Job) -> None:
    if job.module:
        _first_on_path(os.getcwd())
        sys.argv = [job.script, *job.arguments]
        runpy.run_module(job.script, run_name="__main__", alter_sys=True)
        return
    script = os.path.abspath(job.script)
    _first_on_path(os.path.dirname(os.path.realpath(script)))
    sys.argv = [job.script, *job.arguments]
    if os.path.isdir(script):
        runpy.run_path(script, run_name="__main__")
        return
    # Not runpy.run_path: it takes the module away again, and pickled functions of the script could not be found.
    main = types.ModuleType("__main__")
    main.__file__ = script
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    with open(script, "rb") as stream:
        code = compile(stream.read(), script, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _trimmed(error: BaseException) -> str:
    """The traceback without the frames that led to the script and, if it has any of its own, without libraries'."""
    from gaverify.audit.recording.places import is_user_file

    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        own = [frame for frame in part.stack if is_user_file(frame.filename)]
        last = part.stack[-1:] if part.stack and not is_user_file(part.stack[-1].filename) else []
        part.stack = traceback.StackSummary.from_list([*own, *last] if own else [])
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return "".join(whole.format()).rstrip()
