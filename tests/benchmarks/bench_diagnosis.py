"""The diagnosis of a divergent language model of 29.4 million parameters against its two bare passes."""

from __future__ import annotations

from dataclasses import replace

import measuring
import torch
from torch import nn

import gaverify


class _Centred(nn.Module):
    """Subtracts the mean over the batch: the planted fault."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


def planted():  # type: ignore[no-untyped-def]
    """The language model with a cross-sample operation before its last norm."""
    problem = measuring.language_model()
    problem.model.norm = nn.Sequential(_Centred(), problem.model.norm)
    return problem


def bare() -> None:
    """The two passes, for the memory measurement."""
    measuring.bare_passes(planted())


def diagnosed() -> None:
    """The whole verification with diagnosis, for the memory measurement."""
    _check(gaverify.verify(planted(), steps=measuring.STEPS))


def _check(verdict: gaverify.Verdict) -> None:
    found = [finding for finding in verdict.findings if finding.severity == "fault"]
    assert [finding.code for finding in found] == ["GAV102"] and found[0].proven, found


def main() -> None:
    """Measures a coupling inside the model, and wrong weights."""
    problem = planted()
    found, ours, theirs = measuring.ratio(
        lambda: _check(gaverify.verify(problem, steps=measuring.STEPS)), lambda: measuring.bare_passes(problem), 3
    )
    figure = f"{found:.1f} ({ours:.1f} s : {theirs:.1f} s)"
    measuring.show("diagnosis of GAV102, 29.4 M parameters: time", figure, "<= 12")
    ragged = measuring.language_model("ignored")
    found, ours, theirs = measuring.ratio(
        lambda: gaverify.verify(replace(ragged), steps=measuring.STEPS), lambda: measuring.bare_passes(ragged), 3
    )
    figure = f"{found:.1f} ({ours:.1f} s : {theirs:.1f} s)"
    measuring.show("diagnosis of GAV202, 29.4 M parameters: time", figure, "<= 12")
    ours, theirs = (measuring.peak_of("bench_diagnosis", name) for name in ("diagnosed", "bare"))
    figure = f"{ours / theirs:.2f} ({ours / 1e6:.0f} MB : {theirs / 1e6:.0f} MB)"
    measuring.show("diagnosis of GAV102, 29.4 M parameters: peak memory", figure, "<= 1.5")


if __name__ == "__main__":
    main()
