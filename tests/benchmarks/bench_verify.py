"""`verify` on an equivalent language model of 29.4 million parameters against its two bare passes."""

from __future__ import annotations

import measuring

import gaverify


def bare() -> None:
    """The two passes and a clone of the gradients, for the memory measurement."""
    measuring.bare_passes(measuring.language_model())


def verified() -> None:
    """The verification, for the memory measurement."""
    verdict = gaverify.verify(measuring.language_model(), steps=measuring.STEPS)
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT


def main() -> None:
    """Measures both ratios."""
    problem = measuring.language_model()

    def verify() -> None:
        assert gaverify.verify(problem, steps=measuring.STEPS).outcome is gaverify.Outcome.EQUIVALENT

    found, ours, theirs = measuring.ratio(verify, lambda: measuring.bare_passes(problem), 7)
    measuring.show("verify, 29.4 M parameters: time", f"{found:.3f} ({ours:.2f} s : {theirs:.2f} s)", "<= 1.10")
    ours, theirs = (measuring.peak_of("bench_verify", name) for name in ("verified", "bare"))
    figure = f"{ours / theirs:.3f} ({ours / 1e6:.0f} MB : {theirs / 1e6:.0f} MB)"
    measuring.show("verify, 29.4 M parameters: peak memory", figure, "<= 1.05")


if __name__ == "__main__":
    main()
