"""What the recorder adds to ranks: no collective of its own, and of replicas no gradient but rank 0's on disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recorded_ranks import trained

from gaverify.audit.recording.ranks import shards_alone
from gaverify.records.ranks import Engine

WIDTH = 768
GRADIENT = 4 * 2 * (WIDTH * WIDTH + WIDTH)  # bytes of the whole model's


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.slow
@pytest.mark.parametrize("engine", list(Engine))
def test_the_recorder_sends_nothing_between_ranks(tmp_path: Path, engine: Engine) -> None:
    for name in ("bare", "recorded"):
        (tmp_path / name).mkdir()
    bare = trained(tmp_path / "bare", engine, WIDTH, recorded=False)
    recorded = trained(tmp_path / "recorded", engine, WIDTH, recorded=True)
    assert [rank.collectives for rank in recorded] == [rank.collectives for rank in bare]
    assert [rank.traffic for rank in recorded] == [rank.traffic for rank in bare]
    assert min(rank.collectives for rank in bare) > 0 and min(rank.traffic.bytes_moved for rank in bare) > GRADIENT
    stored = [rank.stored for rank in recorded]
    if engine is Engine.DDP:  # two updates of the whole in rank 0, samples in the other
        assert stored[0] > 2 * GRADIENT and stored[1] < GRADIENT
    else:  # half of each in both
        assert min(stored) > GRADIENT and max(stored) < 2 * GRADIENT


def test_what_is_kept_of_another_rank() -> None:
    replica, shard = SimpleNamespace(data=torch.zeros(2)), SimpleNamespace(data=SimpleNamespace(placements=()))
    tensors = {"gradients": {0: torch.ones(2), 1: torch.ones(1)}}
    assert shards_alone(tensors, [replica, shard]) == {"gradients": {1: tensors["gradients"][1]}}  # type: ignore[list-item]
