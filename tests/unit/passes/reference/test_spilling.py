"""Gradients on disk come back as they were, and are measured as those in memory are."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

from gaverify.errors import ProblemError
from gaverify.passes.reference import Spilled, spilling
from gaverify.verdict.comparison import measure
from gaverify.verdict.criteria import Difference

GRADIENTS: dict[str, torch.Tensor | None] = {
    "plain": torch.linspace(-1, 1, 12, device="cpu").reshape(3, 4),
    "transposed": torch.linspace(-1, 1, 12, device="cpu").reshape(3, 4).t(),
    "none": None,
    "scalar": torch.tensor(2.5, dtype=torch.float64, device="cpu"),
    "empty": torch.zeros(0, 3, device="cpu"),
    "half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16, device="cpu"),
    "complex": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64, device="cpu").conj(),
    "sparse": torch.sparse_coo_tensor(torch.tensor([[1]], device="cpu"), torch.ones(1, device="cpu"), (3,)),
}


def spilled() -> Spilled:
    found = Spilled()
    for name, gradient in GRADIENTS.items():
        found.add(name, gradient)
    return found


def test_every_kind_comes_back() -> None:
    found = spilled()
    assert list(found) == list(GRADIENTS) and len(found) == len(GRADIENTS)
    for name, expected in GRADIENTS.items():
        actual = found[name]
        if expected is None or actual is None:
            assert expected is actual
        else:
            assert actual.dtype is expected.dtype and actual.layout is expected.layout
            assert torch.equal(actual.to_dense(), expected.to_dense())


def alike(ours: list[Difference], theirs: list[Difference]) -> bool:
    """The same but for rounding: small gradients are summed in other groups."""
    return all(
        (our.name, our.shape, our.why) == (their.name, their.shape, their.why)
        and our[2:5] == pytest.approx(their[2:5], rel=1e-5, nan_ok=True)
        for our, their in zip(ours, theirs, strict=True)
    )


def test_measured_portion_by_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {name: None if g is None else (g.to_dense() * (1 + 1e-3)) for name, g in GRADIENTS.items()}
    for portion in (1, 1 << 26):
        monkeypatch.setattr(spilling, "_PORTION", portion)
        assert len(list(spilled().portions())) == (1 if portion > 1 else len(GRADIENTS))
        assert alike(measure(other, spilled()), measure(other, GRADIENTS))
        assert alike(measure(spilled(), other), measure(GRADIENTS, other))


def test_the_file_has_no_name_and_goes_with_its_owner(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = spilled()
    assert not list(tmp_path.iterdir())
    number = found._file.fileno()
    os.fstat(number)
    del found
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(number)


class Full:
    """A disk without room."""

    def seek(self, _: int) -> None:
        pass

    def write(self, _: object) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_a_sentence() -> None:
    found = Spilled()
    found._file = Full()
    with pytest.raises(ProblemError, match=r"48 bytes cannot be written to .*No space left.*TMPDIR"):
        found.add("plain", GRADIENTS["plain"])
