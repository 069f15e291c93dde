"""Starts R ranks on this machine through torch's own launcher, and brings back what rank 0 returns.

The launcher (`torch.distributed.launcher`) sets the same variables as `torchrun` and ends all ranks when one fails. It
is called as a function, because `torchrun` as a command takes seconds longer: every rank would import torch again.
Ranks are forked where there are only CPUs. Neither CUDA nor, beside it, autograd runs in a forked process; there ranks
are spawned, and import torch and build the model again.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from gaverify.children.launching import ended_as_interrupted, signal_name, working_folder
from gaverify.collective.membership import is_lost, join_sentences
from gaverify.errors import Agreed, GaverifyError, InternalError, ProblemError, as_foreseen
from gaverify.torch_internals import import_compiler

Answer = TypeVar("Answer")
Progress = Callable[[str, int, int], None]
TellEnd = Callable[[str], None]

_POLL = 0.05  # seconds between two looks of the launcher
_TICK = 0.01  # seconds between two looks of a rank
_LINGER = 3.0  # seconds: how long a rank that failed waits for the others to say whether they failed, too
_KEPT_LINES = 12  # of a traceback that a message shows
_PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process gets when its parent dies
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


def run_on_ranks(
    work: Callable[[Progress, TellEnd], Answer], count: int, progress: Progress | None = None, *, forks: bool = True
) -> Answer:
    """Returns what `work(progress, tell_end)` returns on rank 0 of R ranks, which find each other as under `torchrun`.

    Args:
        work: What every rank runs. It is given what reports progress in this process, and what tells in one sentence
            why its rank is about to end without returning. Picklable where ranks are not forked.
        count: R.
        progress: Is told how far rank 0 is.
        forks: Whether ranks are forked; otherwise they are spawned.

    Raises:
        GaverifyError: What the ranks raised, with the number of the rank where not all did.
        ProblemError: A rank died.
        KeyboardInterrupt: This process was asked to end.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    if forks:
        _import_compiler()
    pipes = [Pipe(duplex=False) for _ in range(count)]
    reading, writing = [pipe[0] for pipe in pipes], [pipe[1] for pipe in pipes]
    with ended_as_interrupted(), working_folder("gaverify-ranks-") as folder, _quiet_launcher():
        failures: Mapping[int, Any] = {}
        answers: Mapping[int, Any] = {}
        with _read_messages(reading, progress) as errors:
            try:
                launch = elastic_launch(_launch_config(count, folder, forks=forks), _run_rank)
                answers = launch(work, writing, str(folder), os.getpid())
            except ChildFailedError as error:
                failures = error.failures
            except SignalException as error:
                raise KeyboardInterrupt from error
            finally:
                # The ranks have their own ends; with this one open, reading would never reach the end of a pipe.
                for pipe in writing:
                    pipe.close()
    if failures or errors:
        raise _explain_failure(errors, failures, count)
    answer = answers[0]
    if isinstance(answer, Agreed):
        raise answer
    return answer  # type: ignore[no-any-return]


def _launch_config(count: int, folder: Path, *, forks: bool) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    # A signal that the caller ignores (nohup) must not end the ranks.
    handled = [
        name for name in ("SIGINT", "SIGTERM", "SIGHUP") if signal.getsignal(_number(name)) is not signal.SIG_IGN
    ]
    options: dict[str, Any] = {"signals_to_handle": ",".join(handled)}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # torch 2.4 has no such option
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # any free port
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=_POLL,
        start_method="fork" if forks else "spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        **{name: value for name, value in options.items() if name in known},
    )


def _number(name: str) -> int:
    return int(getattr(signal, name, signal.SIGTERM))  # Windows has no SIGHUP


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keeps the launcher from writing to the log, and puts back what it changes in this process."""
    handlers = {number: signal.getsignal(number) for number in map(_number, ("SIGINT", "SIGTERM", "SIGHUP"))}
    variable = os.environ.get(_SIGNALS)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    propagated = [logger.propagate for logger in loggers]
    nothing = logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(nothing)
    try:
        yield
    finally:
        for logger, propagates in zip(loggers, propagated, strict=True):
            logger.propagate = propagates
            logger.removeHandler(nothing)
        if variable is None:
            os.environ.pop(_SIGNALS, None)
        else:
            os.environ[_SIGNALS] = variable
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def _read_messages(pipes: Sequence[Connection], progress: Progress | None) -> Iterator[dict[int, GaverifyError]]:
    """Gives the errors that ranks tell, by rank, and passes on their progress, for as long as the block runs."""
    errors: dict[int, GaverifyError] = {}
    over = threading.Event()

    def read() -> None:
        remaining = list(pipes)
        while remaining:
            ended = over.is_set()  # what was written before that is there now
            ready = wait(remaining, 0 if ended else _POLL)
            for pipe in ready:
                try:
                    message = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):  # also in the middle of a message
                    remaining.remove(pipe)  # type: ignore[arg-type]
                    continue
                if isinstance(message, GaverifyError):
                    errors.setdefault(pipes.index(pipe), message)  # type: ignore[arg-type]
                elif progress is not None:
                    progress(*message)
            if ended and not ready:
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield errors
    finally:
        over.set()
        reader.join()
        for pipe in pipes:
            pipe.close()


def _explain_failure(
    errors: Mapping[int, GaverifyError], failures: Mapping[int, Any], count: int
) -> GaverifyError | KeyboardInterrupt:
    """Returns what to raise where ranks failed: of those that know why, what they told."""
    # A fault of gaverify comes first: what the ranks agree on may be its consequence.
    for kind in (InternalError, Agreed):
        if kind is Agreed and any(rank not in errors for rank in failures):
            break  # the others know no more than that a rank is gone
        for error in errors.values():
            if isinstance(error, kind):
                return error
    told = {rank: error for rank, error in errors.items() if not isinstance(error, Agreed) and not is_lost(error)}
    if told:
        sentences = {str(error) for error in told.values()}
        # Where all ranks say the same, the fault is not in one of them: no number is named.
        if len(sentences) == 1 and len(told) == count:
            return told[0]
        return ProblemError(join_sentences({rank: str(error) for rank, error in told.items()}, count))
    dead = {rank: failure.exitcode for rank, failure in failures.items() if rank not in errors}
    if any(code == -signal.SIGINT for code in dead.values()):
        return KeyboardInterrupt()
    for rank, code in dead.items():
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by signal {signal_name(-code).removeprefix('signal ')}"
        return ProblemError(f"rank {rank} of {count} {how} before it was finished")
    return next(iter(errors.values()))


def _run_rank(work: Callable[[Progress, TellEnd], Any], pipes: Sequence[Connection], folder: str, parent: int) -> Any:
    """Runs in each rank: returns what its work returns, or what all ranks agreed to raise."""
    rank = int(os.environ["RANK"])
    _isolate(folder, parent)
    # The launcher's store looks up the address of every rank that connects, under a lock of the C library. A rank that
    # is forked meanwhile would inherit the lock and wait for it for ever.
    _meet(Path(folder), "started", rank, len(pipes))
    if rank:
        warnings.simplefilter("ignore")  # rank 0 says the same

    def send(message: Any) -> None:
        # not `send`: torch would hand tensors over in memory that ends with this process
        pipes[rank].send_bytes(pickle.dumps(message))

    try:
        return work(lambda *step: send(step) if rank == 0 else None, lambda sentence: send(Agreed(sentence)))
    except Agreed as error:
        return Agreed(str(error))
    except BaseException as error:
        send(_as_told(error, rank, len(pipes)))
    # The launcher ends all ranks as soon as one has ended: others may be about to tell of a failure, too.
    _meet(Path(folder), "failed", rank, len(pipes), within=_LINGER)
    sys.stderr.flush()
    os._exit(GaverifyError.exit_code)  # threads of the user's code and of a broken group are not waited for


def _as_told(error: BaseException, rank: int, count: int) -> GaverifyError:
    foreseen = as_foreseen(error)
    if foreseen is None:
        # What the user's code raises is a ProblemError by then; anything else is a fault of ours.
        lines = "".join(traceback.format_exception(error)).rstrip().splitlines()[-_KEPT_LINES:]
        return InternalError("\n".join([f"rank {rank} of {count} raised:", *lines]))
    # What it was raised from may hold tensors or the user's classes, which cannot be pickled.
    foreseen.__cause__ = foreseen.__context__ = foreseen.__traceback__ = None
    return foreseen


def _meet(folder: Path, stage: str, rank: int, count: int, within: float = math.inf) -> None:
    """Waits until all ranks have come to a stage, or for some seconds."""
    (folder / f"{stage}-{rank}").touch()
    limit = time.monotonic() + within
    while len(list(folder.glob(f"{stage}-*"))) < count and time.monotonic() < limit:
        time.sleep(_TICK)


def _isolate(folder: str, parent: int) -> None:
    """Makes a rank end with its parent, and gives it streams, temporary files and one thread of its own."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before it was asked for
        os._exit(1)
    for number in map(_number, ("SIGINT", "SIGTERM", "SIGHUP")):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in the background of a script, or under nohup
            signal.signal(number, signal.SIG_DFL)
    # A thread of the parent, such as a progress bar's, may hold the lock of its stream at the fork, for ever here.
    # Standard output is the report's.
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    torch.set_num_threads(1)  # the threads of the parent's pool were not forked; waiting for them would never end
    # Temporary files of a rank that is killed would stay; the folder around them goes with the parent's.
    tempfile.tempdir = folder
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _import_compiler() -> None:
    """Imports torch's compiler, which both engines import, for seconds: here once, not in every fork.

    The import makes a folder for what is compiled and notes it in the environment; here nothing is compiled.
    """
    cache_before = os.environ.get(_COMPILED)
    import_compiler()
    cache_folder = os.environ.get(_COMPILED)
    if cache_before is None and cache_folder is not None:
        del os.environ[_COMPILED]
        with suppress(OSError):  # not empty: it was there before
            os.rmdir(cache_folder)
