"""Starts R ranks on this machine, which find each other as under `torchrun`, and brings back what rank 0 returns.

Ranks are forked where there are only CPUs: importing torch again takes each of them seconds. Neither CUDA nor, beside
it, autograd runs in a forked process; there ranks are fresh processes, which build the model again.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed as dist

from gaverify.children.group import Group, open_group
from gaverify.children.last_words import Ended
from gaverify.children.launching import Kept, open_pipes
from gaverify.children.ranks import HERE, torchrun_variables
from gaverify.collective.membership import is_lost, join_sentences
from gaverify.errors import Agreed, GaverifyError, InternalError, ProblemError, as_foreseen
from gaverify.torch_internals import import_compiler

Answer = TypeVar("Answer")
Progress = Callable[[str, int, int], None]
TellEnd = Callable[[str], None]

_TICK = 0.01  # seconds between two looks of a rank
_LINGER = 3.0  # seconds: how long other ranks may say whether they failed, too, when one has told why it did
_KEPT_LINES = 12  # of a traceback that a message shows
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


class _Done(NamedTuple):
    """The answer of a rank."""

    answer: Any


@dataclass(frozen=True)
class _RankPlace:
    """A rank among others."""

    rank: int
    """Its number."""
    count: int
    """R."""
    port: int
    """Where the ranks meet."""
    folder: str
    """Of all of them, for their temporary files."""


@dataclass
class _Said:
    """The messages of ranks, by their numbers."""

    answers: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, GaverifyError] = field(default_factory=dict)
    dead: dict[int, Ended] = field(default_factory=dict)
    """Those that ended without a word."""


def run_on_ranks(
    work: Callable[[Progress, TellEnd], Answer], count: int, progress: Progress | None = None, *, forks: bool = True
) -> Answer:
    """Returns what `work(progress, tell_end)` returns on rank 0 of R ranks, which find each other as under `torchrun`.

    Args:
        work: The function that every rank runs. It is given one function that reports progress in this process, and one
            that tells in a sentence why its rank is about to end without returning. Picklable where ranks are not
            forked.
        count: R.
        progress: Is told how far rank 0 is.
        forks: Whether ranks are forked; otherwise they are fresh processes.

    Raises:
        GaverifyError: The ranks raised it; with the number of the rank where not all did.
        ProblemError: A rank died.
        KeyboardInterrupt: This process was asked to end.
    """
    if forks:
        _import_compiler()
    with _hosted_store() as port, open_group("gaverify-ranks-") as group:
        ranks = []
        for rank in range(count):
            place = _RankPlace(rank, count, port, str(group.folder))
            if forks:
                ranks.append(group.fork(partial(_run_rank, work, place)))
            else:
                ranks.append(group.start_module("gaverify.collective.launching", {}))
                ranks[rank].send((work, place))
        said = _listen(group, ranks, progress)
    if said.errors or said.dead:
        raise _explain_failure(said, count)
    answer = said.answers[0]
    if isinstance(answer, Agreed):
        raise answer
    return answer  # type: ignore[no-any-return]


@contextmanager
def _hosted_store() -> Iterator[int]:
    """Gives the port of a store in this process: it stays when a rank has died, and others read what that one wrote."""
    store = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    try:
        yield store.port
    finally:
        # A traceback would keep it. The collector of a process that is forked later would then wait for its thread,
        # which was not forked.
        del store


def _listen(group: Group, ranks: Sequence[Kept], progress: Progress | None) -> _Said:
    """Returns what the ranks say until all have ended, or one has failed."""
    said = _Said()
    until = math.inf
    while group.processes and (news := group.receive(until)) is not None:
        rank, message = ranks.index(news[0]), news[1]
        if isinstance(message, _Done):
            said.answers[rank] = message.answer
        elif isinstance(message, GaverifyError):
            said.errors.setdefault(rank, message)
        elif not isinstance(message, Ended):
            if progress is not None:
                progress(*message)
        elif rank in said.errors:
            until = min(until, time.monotonic() + _LINGER)
        elif rank not in said.answers:
            said.dead[rank] = message
            break  # the others wait for it, and know no more than that it is gone
    return said


def _explain_failure(said: _Said, count: int) -> GaverifyError:
    """Returns what to raise where ranks failed: of those that know why, what they told."""
    errors = said.errors
    # A fault of gaverify comes first: what the ranks agree on may be its consequence.
    for kind in (InternalError, Agreed):
        if kind is Agreed and said.dead:
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
    for rank, ended in said.dead.items():
        return ProblemError(f"rank {rank} of {count} {ended} before it was finished")
    return next(iter(errors.values()))


def main() -> None:
    """Runs in a fresh process: is told which rank it is, and works as that."""
    hears, says = open_pipes()
    work, place = hears.recv()
    _run_rank(work, place, says)
    os._exit(0)


def _run_rank(work: Callable[[Progress, TellEnd], Any], place: _RankPlace, says: Connection) -> None:
    """Runs in each rank: sends what its work returns, or what all ranks agreed to raise."""
    rank, count = place.rank, place.count
    # The store of the process that started the ranks is theirs, as torchrun's is.
    os.environ |= torchrun_variables(rank, count, place.port)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    torch.set_num_threads(1)  # the threads of the parent's pool were not forked; waiting for them would never end
    # Temporary files of a rank that is killed would stay; the folder around them goes with the parent's.
    tempfile.tempdir = place.folder
    # The store looks up the address of every rank that connects, under a lock of the C library. A rank that is forked
    # meanwhile would inherit the lock and wait for it for ever.
    _await_all(Path(place.folder), rank, count)
    if rank:
        warnings.simplefilter("ignore")  # rank 0 says the same

    def report(*step: Any) -> None:
        if rank == 0:
            says.send(step)

    try:
        says.send(_Done(work(report, lambda sentence: says.send(Agreed(sentence)))))
    except Agreed as error:
        says.send(_Done(Agreed(str(error))))
    except BaseException as error:
        with suppress(OSError):  # nobody hears it: all are being ended
            says.send(_as_told(error, rank, count))
        sys.stderr.flush()
        os._exit(GaverifyError.exit_code)  # threads of the user's code and of a broken group are not waited for


def _as_told(error: BaseException, rank: int, count: int) -> GaverifyError:
    foreseen = as_foreseen(error)
    if foreseen is None:
        # Errors of the user's code are a ProblemError by then; anything else is a fault of ours.
        lines = "".join(traceback.format_exception(error)).rstrip().splitlines()[-_KEPT_LINES:]
        return InternalError("\n".join([f"rank {rank} of {count} raised:", *lines]))
    # The errors that it was raised from may hold tensors or the user's classes, which cannot be pickled.
    foreseen.__cause__ = foreseen.__context__ = foreseen.__traceback__ = None
    return foreseen


def _await_all(folder: Path, rank: int, count: int) -> None:
    """Waits until all ranks have started."""
    (folder / f"started-{rank}").touch()
    while len(list(folder.glob("started-*"))) < count:
        time.sleep(_TICK)


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
