"""Buffers that follow the full-batch run, and the decay of a moving average."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gaverify.audit.recording.averages import Average
from gaverify.audit.recording.control import Buffers
from gaverify.audit.recording.storage import Storage


class TestBuffers:
    def run_of(self, folder: Path, scale: float) -> tuple[Buffers, nn.Module, Storage]:
        torch.manual_seed(0)
        model = nn.BatchNorm1d(3)
        model.register_buffer("still", torch.ones(2, device="cpu"))
        kept = Buffers(None)
        kept.know(dict(model.named_buffers()))
        model(scale * torch.randn(8, 3, device="cpu"))
        return kept, model, Storage(folder)

    def test_running_statistics_become_those_of_the_full_batch(self, tmp_path: Path) -> None:
        kept, full, storage = self.run_of(tmp_path, 1.0)
        kept.keep(storage, "0-1", dict(full.named_buffers()))
        other = self.run_of(tmp_path, 3.0)[1]
        assert not torch.equal(other.running_var, full.running_var)
        Buffers(tmp_path).put("0-1", dict(other.named_buffers()))
        assert torch.equal(other.running_var, full.running_var)

    def test_what_never_changes_is_not_written(self, tmp_path: Path) -> None:
        kept, full, storage = self.run_of(tmp_path, 1.0)
        kept.keep(storage, "0-1", dict(full.named_buffers()))
        assert "still" not in torch.load(tmp_path / "buffers-0-1.pt", weights_only=True)
        kept.keep(storage, "0-2", dict(full.named_buffers()))
        assert not (tmp_path / "buffers-0-2.pt").exists()

    def test_buffers_of_another_shape_are_left_alone(self, tmp_path: Path) -> None:
        kept, full, storage = self.run_of(tmp_path, 1.0)
        kept.keep(storage, "0-1", dict(full.named_buffers()))
        other = nn.BatchNorm1d(5)
        Buffers(tmp_path).put("0-1", dict(other.named_buffers()))
        assert torch.equal(other.running_var, torch.ones(5, device="cpu"))


class TestAverages:
    @pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999, 0.9999])
    def test_the_decay_is_found(self, decay: float) -> None:
        torch.manual_seed(0)
        average, model = nn.Linear(32, 32), nn.Linear(32, 32)
        update = Average(average, model)
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 1 - decay)
        found = update.decay()
        assert abs(found["decay"] - decay) < found["slack"] < 1e-4

    def test_an_average_that_is_the_weights_tells_none(self) -> None:
        model = nn.Linear(4, 4)
        assert Average(model, model).decay() == {}
