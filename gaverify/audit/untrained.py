"""What to say of a run that made no update: what it did instead, and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gaverify.audit.job import Job
from gaverify.errors import ProblemError
from gaverify.records.audit_report import TITLES
from gaverify.records.events import Ending

if TYPE_CHECKING:
    from gaverify.audit.processes import Done
    from gaverify.audit.reading import Run

_TRAIN = "give arguments with which it trains for at least one update"


def check_updates(child: Done, run: Run) -> None:
    """Raises unless the script trained.

    Args:
        child: The process.
        run: What it recorded.

    Raises:
        ProblemError: It made no step, or stepped without any gradient.
    """
    backwards = any(event.kind == "backward" for event in run.events)
    if not any(event.kind == "step" for event in run.events):
        if run.meta["by_hand"] and not child.job.by_hand:
            return  # it is run again
        seen = f"backward passes, but no optimizer step; {_TRAIN}" if backwards else _instead(child.job, run)
        raise ProblemError(_sentence(child, run, "reached no optimizer step", f"it made {seen}"))
    if not backwards and not run.meta["had_gradients"]:
        raise ProblemError(_sentence(child, run, "stepped without any backward pass and without a gradient", _TRAIN))


def _instead(job: Job, run: Run) -> str:
    """What a script did that was seen to train nothing, with what would help."""
    if run.meta.get("processes") and not job.launcher:
        return (
            f"no update in its own process, and started {run.meta['processes']} others; if those train, write "
            "`--launcher python` so that they are recorded"
        )
    if run.meta.get("elsewhere"):
        return (
            "backward passes of tensors that are no `nn.Parameter`, whose updates cannot be judged; make the weights "
            "an `nn.Parameter` that an optimizer of `torch.optim` holds"
        )
    if run.meta["left_out"].get("torch.func"):
        return (
            "gradients with `torch.func` for weights that no module or optimizer holds, which cannot be judged; assign "
            "them to the `.grad` of a module's parameters and step an optimizer of `torch.optim`"
        )
    return f"neither a backward pass nor an optimizer step; {_TRAIN}"


def _sentence(child: Done, run: Run, what: str, advice: str) -> str:
    left = Ending(run.meta["reason"]) is Ending.EXIT
    how = f"it left with sys.exit({run.meta['status']})" if left else "it ran to its end"
    return f"the {TITLES[child.job.role]} {what} ({how}): {child.command}\n{advice}"
