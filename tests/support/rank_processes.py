"""Runs functions of tests as ranks on this machine, forked by torch's own starter of processes."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


@contextmanager
def join_group(rank: int, ranks: int, store: Path) -> Iterator[None]:
    """Enters the process group of ranks on this machine, through a file: no port can be taken."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    files = dist.FileStore(str(store), ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=files, rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_each(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns what each function returns in a process of its own; raises what one of them raised."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(_work, (works, folder), nprocs=len(works), start_method="fork")
        return [pickle.loads((Path(folder) / str(number)).read_bytes()) for number in range(len(works))]


def _work(number: int, works: Sequence[Callable[[], Any]], folder: str) -> None:
    torch.set_num_threads(1)  # the threads of the parent's pool were not forked
    (Path(folder) / str(number)).write_bytes(pickle.dumps(works[number]()))
