"""GAV101, GAV102, GAV103: the samples of a batch act on each other."""

from __future__ import annotations

from gaverify.diagnosis.measurements import Measurements
from gaverify.probes.module_coupling import Coupling
from gaverify.results import Evidence, Finding, Location


def batch_statistics(measured: Measurements) -> Finding | None:
    """GAV101: a module scales its channels by statistics of the batch that it is given."""
    coupling = measured.coupling
    if coupling is None or coupling.module is None or not coupling.batch_statistics:
        return None
    return Finding(
        "GAV101", "batch-statistics", "fault",
        f"`{coupling.module or '(root)'}` ({coupling.kind}) normalises over the micro-batch",
        location=Location(coupling.module, coupling.kind), evidence=(_evidence(measured, coupling),),
        remedy="freeze its statistics (`.eval()` on the layer, after every `model.train()`), or use GroupNorm or LayerNorm",
    )  # fmt: skip


def cross_sample_operation(measured: Measurements) -> Finding | None:
    """GAV102: another module mixes samples."""
    coupling = measured.coupling
    if coupling is None or coupling.module is None or coupling.batch_statistics:
        return None
    return Finding(
        "GAV102", "cross-sample-operation", "fault",
        f"`{coupling.module or '(root)'}` ({coupling.kind}) mixes the samples of a micro-batch",
        location=Location(coupling.module, coupling.kind), evidence=(_evidence(measured, coupling),),
        remedy="look in its forward for reductions, sorting or permutation over the batch dimension",
    )  # fmt: skip


def batch_coupled_loss(measured: Measurements) -> Finding | None:
    """GAV103: all module outputs agree, and no micro-batch weights give the full-batch gradient."""
    coupling, fit = measured.coupling, measured.fit
    if coupling is None or coupling.module is not None or coupling.calls == 0 or fit is None:
        return None
    return Finding(
        "GAV103", "batch-coupled-loss", "fault",
        "the loss is not a weighted sum over samples: it compares or normalises samples of one batch with each other",
        evidence=(
            Evidence("micro-batch-weights", "measured",
                     f"{measured.largest}; the best micro-batch weights leave {fit.residual:.1e} of the gradient over",
                     {"residual": fit.residual}),
            Evidence("module-coupling", "measured", f"the outputs of all {coupling.calls} module calls agree", {}),
        ),
        remedy="accumulate what the loss compares (a cached-gradient step), or accept the smaller set of comparisons",
    )  # fmt: skip


def _evidence(measured: Measurements, coupling: Coupling) -> Evidence:
    name = coupling.module or "(root)"
    return Evidence(
        "module-coupling", "measured",
        f"{measured.largest}; `{name}` is the first module whose inputs agree and whose output does not: "
        f"by {coupling.difference:.1e}, for {coupling.samples} of {measured.batch_size} samples",
        {"difference": coupling.difference, "samples": coupling.samples, "downstream": list(coupling.others)},
    )  # fmt: skip
