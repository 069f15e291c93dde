"""Loops that differ from the canonical one in a line or two; scripts of `tests/scripts` hold them at `#: loops`.

Such a script is written whole into a folder of its own when a test asks where it lies. The loop's name stands at the
line that an audit has to name, as `# here: NAME`.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import textwrap
from functools import cache
from pathlib import Path
from typing import NamedTuple

from patched_scripts import (
    AVERAGED,
    INLINE,
    LAST,
    LOOP,
    WITH_LAST,
    Change,
    Habit,
    chain,
    drop,
    fill,
    insert,
    outdent,
    swap,
)

SCRIPTS = Path(__file__).parent.parent / "scripts"
NAMES = {"K": "args.accum", "epochs": "args.epochs", "epoch": "_", "x": "features", "y": "labels"}


class Mutation(NamedTuple):
    """Makes a loop of the canonical one; `line` matches the line that an audit has to name, or the first of several."""

    change: Change
    line: str


def loop(*changes: Change, line: str = r"loss\.backward") -> Mutation:
    """Makes a loop by several changes, one after the other."""
    return Mutation(chain(*changes), line)


EPOCHS = INLINE(LOOP)
EPOCH = textwrap.dedent(EPOCHS.partition("\n")[2])
FIRST, FORWARD, BACKWARD, BOUNDARY = "for i, ", r"loss =", r"loss\.backward", r"if .i"
STEP, CLEAR = r"optimizer\.step", "zero_grad"
UNDIVIDED = swap((" / K", ""))
DIVIDED_LAST = chain(UNDIVIDED, swap(("loss.backward()", "(loss / K).backward()")))
PENALTY = "sum(weight.square().sum() for weight in model.parameters())"
PENALISED = insert(f"loss = loss + 0.01 * {PENALTY}", before=r"\.backward")
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)"
AVERAGE = "torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)"
AVERAGING = chain(
    insert(f"average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn={AVERAGE})", before=FIRST),
    insert("average.update_parameters(model)", after=CLEAR),
)
SCHEDULING = chain(
    insert("scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=16)", before=FIRST),
    insert("scheduler.step()", after=CLEAR),
)
SCALING = chain(
    insert("scaler = torch.amp.GradScaler(args.device, init_scale=256.0, growth_interval=100)", before=FIRST),
    insert("with torch.autocast(args.device, dtype=torch.bfloat16):", before=FORWARD),
    swap(("    loss =", "        loss ="), ("loss.backward()", "scaler.scale(loss).backward()")),
    swap(("optimizer.step()", "scaler.step(optimizer)")),
)

# the scale of the loss: wrong, then right
SCALE = {
    "division_forgotten": loop(UNDIVIDED),
    "divided_twice": loop(
        swap(("criterion(model(x), y)", "compute_loss(x, y)")),
        insert("def compute_loss(x, y):", before=FIRST),
        insert("return criterion(model(x), y) / K", after="def compute", levels=1),
    ),
    # the number of micro-batches of another run, in both runs
    "divided_by_constant": loop(swap((" / K", " / 16"))),
    "scaled_after_backward": loop(UNDIVIDED, insert("loss = loss / K", after=BACKWARD)),
    # the mean over the samples is divided; the penalty on the weights is added once per micro-batch
    "penalty_undivided": loop(PENALISED, line="0.01"),
    # the same behind a warm-up of one update
    "penalty_later": loop(PENALISED, swap(("0.01", "(0.01 if i >= K else 0.0)")), line="0.01"),
    "penalty_divided": loop(PENALISED, DIVIDED_LAST),
    # the last window of an epoch is short, and divided by the configured number all the same, or by what it has
    "short_window": loop(swap((" == 0:", f" == 0{LAST}"))),
    "short_window_divided": loop(WITH_LAST),
    # the mean over the matched samples times the batch size, as detectors do it; nothing is divided
    "matched_targets": loop(
        swap(("model(x), y) / K", "model(x)[matched], y[matched]) * len(y)")),
        insert("matched = x[:, 0] > -0.5", before=FORWARD),
    ),
    # samples without a label count for nothing; one micro-batch has no other
    "empty_micro_batch": loop(
        swap(("(x), y)", "(x), y.masked_fill(unlabelled, -100))")),
        insert("unlabelled = args.batch_size * (i % K) + torch.arange(len(y)) < 4", before=FORWARD),
    ),
    # a weighted cross entropy divides by the weights of the classes that it is given
    "class_weights": loop(
        swap(("criterion(", "weighted(")),
        insert("weighted = torch.nn.CrossEntropyLoss(torch.arange(1.0, 1 + classes))", before=FIRST),
        insert("classes = model(next(iter(loader))[0]).shape[-1]", before="weighted ="),
    ),
    "usual": loop(),
    "gradients_divided": loop(UNDIVIDED, AVERAGED),
    "cleared_at_start": loop(
        drop(CLEAR), insert("if i % K == 0:", before=FORWARD), insert("optimizer.zero_grad()", after="if i %", levels=1)
    ),
    "cleared_by_hand": loop(
        swap(("optimizer.zero_grad()", "for p in model.parameters():")),
        insert("p.grad = None", after="for p in", levels=1),
    ),
    # K times the mean is logged
    "logged_loss_off": loop(
        DIVIDED_LAST,
        insert("print(f'loss {running:.3f}')", before=STEP),
        insert("running = 0.0", before=f"(?:{FIRST}|{STEP})"),
        insert("running += loss.item()", after=FORWARD),
    ),
    # each micro-step multiplies by the same constant, kept in a tensor
    "constant_divisor": loop(
        UNDIVIDED,
        swap(("backward()", "backward(gradient=weight)")),
        insert("weight = torch.tensor(1.0 / K)", before=FIRST),
    ),
}
# where the step and the clearing of gradients stand
STEPS = {
    "cleared_inside": loop(drop(CLEAR), insert("optimizer.zero_grad()", before=FORWARD), line=CLEAR),
    # micro-batches after the last full window of an epoch are thrown away
    "cleared_at_epoch": loop(insert("optimizer.zero_grad()", before=FIRST), line=CLEAR),
    "leaks_into_next_epoch": loop(line=STEP),
    "never_cleared": loop(drop(CLEAR), line=STEP),
    "all_but_the_boundary": loop(swap(("(i + 1) % K == 0", "K == 1 or (i + 1) % K != 0")), line=STEP),
    "step_outside_the_if": loop(
        outdent(r"optimizer\."), insert("print(f'update: loss {loss.item():.3f}')", after=BOUNDARY, levels=1), line=STEP
    ),
    "decay_by_hand": loop(
        insert("with torch.no_grad():", before=BOUNDARY),
        insert("for p in model.parameters():", after="with torch", levels=1),
        insert("p.mul_(1 - args.lr * 0.1)", after="for p in", levels=1),
        line="mul_",
    ),
    # three of four micro-batches are computed for nothing
    "backward_at_the_boundary": loop(drop(BACKWARD), insert("loss.backward()", before=STEP)),
    # a micro-batch of window `--skipped` looks bad to the script, and is left out
    "skipping": loop(
        insert("if K > 1 and i == (args.skipped - 1) * K + 1:", after=FORWARD),
        insert("continue", after="if K", levels=1),
        line=FORWARD,
    ),
}
# what else belongs to an update: clipping, schedulers, averages, a grad scaler
EXTRAS = {
    "clip_per_micro_batch": loop(insert(CLIP, before=BOUNDARY), line="clip_grad"),
    "clip_by_hand_per_micro_batch": loop(
        insert("norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()", before=BOUNDARY),
        insert("for p in model.parameters():", before=BOUNDARY),
        insert("p.grad.mul_(min(1.0, args.clip / norm.item()))", after=r"for p in model.parameters\(\):", levels=1),
        line="mul_",
    ),
    "clip_per_update": loop(insert(CLIP, before=STEP)),
    "schedule_per_micro_batch": loop(SCHEDULING, outdent("scheduler.step"), line="scheduler.step"),
    "schedule_per_update": loop(SCHEDULING),
    "average_per_micro_batch": loop(AVERAGING, outdent("update_param"), line="update_param"),
    "average_per_update": loop(AVERAGING),
    "scaler_per_micro_batch": loop(
        SCALING,
        insert("scaler.unscale_(optimizer)", before=BOUNDARY),
        insert("scaler.update()", after=CLEAR),
        outdent("scaler.update"),
        line="unscale_",
    ),
    "scaler_per_update": loop(
        SCALING,
        insert("scaler.unscale_(optimizer)", before="scaler.step"),
        insert(CLIP, before="scaler.step"),
        insert("scaler.update()", after="scaler.step"),
    ),
}
LOOPS = {"loops_scale.py": (EPOCH, SCALE), "loops_steps.py": (EPOCHS, STEPS), "loops_extras.py": (EPOCH, EXTRAS)}


def path_of(script: str) -> Path:
    """Where a script of `tests/scripts` lies, with its loops."""
    return Path(_folder().name).resolve() / script if script in LOOPS else SCRIPTS / script


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Writes the scripts into a folder that goes with this process."""
    folder = tempfile.TemporaryDirectory(prefix="gaverify-loops-")
    shutil.copy(SCRIPTS / "points.py", folder.name)
    for script, (canonical, mutations) in LOOPS.items():
        functions = "\n\n".join(_write(name, canonical, mutation) for name, mutation in mutations.items())
        frame = (SCRIPTS / script).read_text(encoding="utf-8")
        written = fill(frame, Habit(NAMES, ""), {"loops": functions}, 0)
        Path(folder.name, script).write_text(written, encoding="utf-8")
    return folder


def _write(name: str, canonical: str, mutation: Mutation) -> str:
    """A function of the script that trains with a loop."""
    lines = mutation.change(canonical)
    marked = re.sub(rf"(?m)^(.*(?:{mutation.line}).*)$", rf"\1  # here: {name}", lines, count=1)
    return f"def {name}(args, model, optimizer, loader):\n{textwrap.indent(marked, '    ')}"
