"""What the profiler costs: one update with the hooks that count activations against one without, per strategy."""

from __future__ import annotations

import measuring

from gaverify.profiling.workload import ActivationMeter, workload
from gaverify.records.profile import Plan
from gaverify.spec import Spec


def hooks(name: str, problem, rounds: int) -> None:  # type: ignore[no-untyped-def]
    """Times updates of a problem with and without the hooks, in turns."""
    for plan in (Plan("full-batch", 1), Plan("summed-loss", 4), Plan("accumulate", 4)):
        with workload(problem, Spec(model=name), plan) as work:
            work.start()
            batches = list(work.micro_batches())
            kept = work.kept_anyway()

            def counted(work=work, batches=batches, kept=kept) -> None:  # type: ignore[no-untyped-def]
                with ActivationMeter(kept).counting():
                    work.update(batches)

            def bare(work=work, batches=batches) -> None:  # type: ignore[no-untyped-def]
                work.update(batches)

            found, ours, theirs = measuring.ratio(counted, bare, rounds)
        figure = f"{found:.2f} ({ours * 1e3:.2f} ms : {theirs * 1e3:.2f} ms)"
        measuring.show(f"{name}, {plan.strategy}, K = {plan.steps}: hooks on : off", figure, "< 1.25")


def main() -> None:
    """Measures a large model, where an update is arithmetic, and a small one, where it is overhead."""
    from gaverify.zoo import mnist_mlp

    hooks("mnist-mlp", mnist_mlp.build(), 200)
    hooks("30 million parameters", measuring.language_model(), 5)


if __name__ == "__main__":
    main()
