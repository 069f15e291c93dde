"""Lets a process join a group of `torch.distributed` whose members all run on this machine."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from gaverify.children.launching import working_folder

_LOOPBACK = "lo"


@contextmanager
def joined(rank: int, ranks: int, store: Path, backend: str = "gloo") -> Iterator[None]:
    """Enters the process group of the ranks on this machine, through a file: no port can be taken.

    Args:
        rank: From 0.
        ranks: R.
        store: A path that exists for this run only.
        backend: As `torch.distributed` names it.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    dist.init_process_group(backend, store=FileStore(str(store), ranks), rank=rank, world_size=ranks)
    yield
    dist.destroy_process_group()  # not after a failure, which has to be told before others lose their connections


@contextmanager
def alone() -> Iterator[None]:
    """Joins a group of world size 1."""
    with working_folder("gaverify-ranks-") as folder, joined(0, 1, folder / "store"):
        yield


def of_every_rank(own: Any, ranks: int, device: torch.device | None = None) -> list[Any]:
    """Returns what each rank gives; torch's own exchange of objects needs NumPy.

    Args:
        own: What this rank gives; picklable.
        ranks: R.
        device: One that the group's backend knows; None: the CPU.
    """
    there = device or torch.device("cpu")
    packed = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8).to(there)
    sizes = [torch.zeros(1, dtype=torch.int64, device=there) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(packed)], dtype=torch.int64, device=there))
    most = max(int(size) for size in sizes)
    parts = [torch.zeros(most, dtype=torch.uint8, device=there) for _ in range(ranks)]
    dist.all_gather(parts, torch.nn.functional.pad(packed, (0, most - len(packed))))
    return [pickle.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]
