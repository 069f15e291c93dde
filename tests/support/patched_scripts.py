"""Training scripts with one fault each, and their right twins, for repairs that are printed as patches.

A script is made of three parts. A canonical loop has six slots: clear, forward, scale, backward, boundary and step. A
habit is how an author writes the script around it (`tests/scripts/patched/HABIT.txt`), with names of its own for what
the loop uses. A mutation replaces a slot. Seven more scripts stand as strangers wrote them, beside what repairs each.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent.parent / "scripts" / "patched"
Change = Callable[[str], str]

LOOP = """\
for epoch in range(epochs):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        loss = loss / K
        loss.backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
FORWARD, SCALE, BACKWARD, BOUNDARY, STEP, CLEAR = (f"{line}\n" for line in LOOP.splitlines()[2:])
# The micro-batches are parts of a batch: 16 rows in 3 parts are 6, 6 and 4.
PARTS = """\
for epoch in range(epochs):
    for x, y in loader:
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(K), y.chunk(K)):
            loss = criterion(model(xs), ys)
            loss = loss / K
            loss.backward()
        optimizer.step()
"""
ACCELERATED = """\
for epoch in range(epochs):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = criterion(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
"""


def swap(*edits: tuple[str, str]) -> Change:
    """Replaces each text by the other, where the loop holds it."""

    def change(loop: str) -> str:
        for old, new in edits:
            loop = loop.replace(old, new)
        return loop

    return change


def swap_first(*edits: tuple[str, str]) -> Change:
    """Replaces the first of several texts that the loop holds."""
    return lambda loop: swap(next(edit for edit in edits if edit[0] in loop))(loop)


def drop(words: str) -> Change:
    """Takes out the lines that match."""
    return lambda loop: re.sub(rf"(?m)^.*(?:{words}).*\n", "", loop)


def outdent(words: str) -> Change:
    """Takes one level off the lines that match."""
    return lambda loop: re.sub(rf"(?m)^    (.*(?:{words}).*\n)", r"\1", loop)


def insert(line: str, before: str = "", after: str = "", levels: int = 0) -> Change:
    """Puts a line beside those that match, at their indentation or deeper."""
    deeper = "    " * levels
    if before:
        return lambda loop: re.sub(rf"(?m)^( *)(?=.*{before})", rf"\1{deeper}{line}\n\1", loop)
    return lambda loop: re.sub(rf"(?m)^( *)(.*{after}.*\n)", rf"\1\2\1{deeper}{line}\n", loop)


def chain(*changes: Change) -> Change:
    """Makes several changes, one after the other."""

    def change(loop: str) -> str:
        for each in changes:
            loop = each(loop)
        return loop

    return change


class Fault(NamedTuple):
    """A mutation of the loop.

    Args:
        code: What an audit calls it.
        change: What makes the right loop wrong.
        lines: How many lines a patch may take out, and put in.
        twin: What makes the canonical loop the right one.
        loop: The loop that is changed, if not the habit's.
        slots: Lines for the slots of the script around the loop.
        wrong_slots: What stands there in the wrong script.
        samples: Rows of an epoch.
        sizes: Rows of a micro-batch, and K.
        unsafe: The patch changes the model, or the meaning of a hyperparameter.
    """

    code: str
    change: Change
    lines: tuple[int, int]
    twin: Change = chain()
    loop: str = ""
    slots: Mapping[str, str] = {}
    wrong_slots: Mapping[str, str] = {}
    samples: int = 64
    sizes: tuple[int, int] = (4, 4)
    unsafe: bool = False


class Habit(NamedTuple):
    """How an author writes.

    Args:
        names: What the author calls the names of the canonical loop.
        run: The arguments of a run, or the constants (where it says so) that are changed in the source.
        style: What makes the canonical loop the author's.
        indent: The indentation of one level.
        loop: The loop that the author begins with; none: the change is one of the whole script.
        hf: It needs packages that gaverify does not.
        constants: The source is changed.
    """

    names: Mapping[str, str]
    run: str
    style: Change = chain()
    indent: str = "    "
    loop: str = LOOP
    hf: bool = False
    constants: bool = False


INLINE = chain(drop("loss = loss / K"), swap(("y)\n", "y) / K\n"), ("ys)\n", "ys) / K\n")))
CALLED = chain(drop("loss = loss / K"), swap(("loss.backward()", "(loss / K).backward()")))

HABITS = {
    "argparse": Habit({"K": "args.accum", "epochs": "args.epochs"}, "--batch-size {batch} --accum {accum}"),
    "constants": Habit(
        {
            **{"K": "ACCUM_STEPS", "epochs": "NUM_EPOCHS", "loader": "train_loader", "model": "net"},
            **{"criterion": "F.cross_entropy", "optimizer": "opt", "i": "step", "x": "images", "y": "targets"},
        },
        "BATCH_SIZE={batch} ACCUM_STEPS={accum}",
        INLINE,
        constants=True,
    ),
    "config": Habit(
        {
            **{"K": "config['accumulation_steps']", "epochs": "config['epochs']", "loader": "train_dl"},
            **{"criterion": "loss_fn", "i": "batch_idx", "x": "xb", "y": "yb"},
        },
        "batch_size={batch} accumulation_steps={accum}",
        chain(
            insert("output = model(x)  # forward", before=r"criterion\(model\(x\)"),
            swap(("criterion(model(x), y)", "criterion(output, y)")),
            insert("total_loss += loss.item()", after="criterion"),
        ),
        indent="  ",
    ),
    "dataclass": Habit(
        {"K": "cfg.gradient_accumulation_steps", "epochs": "cfg.epochs", "loss": "batch_loss"},
        "TrainConfig.batch_size={batch} TrainConfig.gradient_accumulation_steps={accum}",
        chain(CALLED, swap(("zero_grad()", "zero_grad(set_to_none=True)"))),
        constants=True,
    ),
    "click": Habit({"K": "accum_iter", "loader": "data_loader", "i": "data_iter_step"}, "-b {batch} -a {accum}"),
    "trainer": Habit(
        {
            **{"K": "self.accumulation_steps", "loader": "self.loader", "model": "self.model"},
            **{"criterion": "self.criterion", "optimizer": "self.optimizer", "scheduler": "self.scheduler"},
            **{"i": "idx", "labels": "y"},
        },
        "--bs {batch} --accum {accum}",
        insert("self.history.append(loss.item())", after=r"loss\.backward"),
        indent="\t",
    ),
    "notebook": Habit(
        {
            **{"K": "grad_accum", "epochs": "n_epochs", "loader": "train_dl", "model": "head"},
            **{"criterion": "loss_func", "optimizer": "opt", "x": "xb", "y": "yb", "labels": "train_y"},
        },
        "bs={batch} grad_accum={accum}",
        chain(INLINE, swap(("(i + 1)", "(i+1)"))),
        constants=True,
    ),
    "scaled": Habit(
        {"K": "iters_to_accumulate", "epochs": "2", "x": "input", "y": "target"},
        "--batch_size {batch} --iters_to_accumulate {accum}",
        chain(
            insert("with torch.autocast(device_type=device, dtype=torch.bfloat16):", before="criterion"),
            swap((FORWARD, f"    {FORWARD}"), ("loss.backward()", "scaler.scale(loss).backward()")),
            insert("scaler.step(optimizer)", before=r"optimizer\.step"),
            swap(("optimizer.step()", "scaler.update()")),
        ),
    ),
    "accelerate": Habit(
        {"K": "args.gradient_accumulation_steps", "epochs": "2", "loader": "train_dataloader"},
        "--batch_size {batch} --gradient_accumulation_steps {accum}",
        loop=ACCELERATED,
        hf=True,
    ),
    "fabric": Habit(
        {"K": "hparams.accum", "epochs": "2"},
        "--batch-size {batch} --accum {accum}",
        chain(INLINE, swap(("loss.backward()", "fabric.backward(loss)"))),
        hf=True,
    ),
    "lightning": Habit({}, "--batch-size {batch} --accumulate {accum}", loop="", hf=True),
    "transformers": Habit({}, "--batch-size {batch} --accum {accum}", loop="", hf=True),
}

CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)"
LAST, IN_WINDOW = " or i + 1 == len(loader):", "min(K, len(loader) - i // K * K)"
WITH_LAST = swap((" == 0:", f" == 0{LAST}"), (" / K", f" / {IN_WINDOW}"))
WITHOUT_LAST = swap((LAST, ":"), (IN_WINDOW, "K"))
AVERAGED = chain(
    drop("loss = loss / K"),
    insert("for p in model.parameters():", before=r"optimizer\.step"),
    insert("p.grad /= K", after="for p in model", levels=1),
)
SCHEDULED = insert("scheduler.step()", after="zero_grad")
SCHEDULER = {"setup": "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)"}
RATE = r"optimizer.param_groups[0]['lr'] = cfg.lr * 0.8 ** updates"
IGNORED = {"data": "labels[torch.arange(N) % 16 < 3] = -100  # not annotated"}
COUNTED = chain(
    swap(("criterion(model(x), y)", "nn.functional.cross_entropy(model(x), y, reduction='sum')")),
    swap(("loss = loss / K", "count += (y != -100).sum()")),
    insert("for p in model.parameters():", before=r"optimizer\.step"),
    insert("p.grad /= count", after="for p in model", levels=1),
    insert("count = 0", after="zero_grad"),
    insert("count = 0", before=r"for i, \(x"),
)
NORMALISED = {"norm": "nn.LayerNorm(16),", "member": "self.norm = nn.LayerNorm(16)", "use": "h = self.norm(h)"}

FAULTS = {
    "undivided": Fault("GAV201", swap_first(("(loss / K)", "loss"), (SCALE, ""), (" / K", "")), (1, 1)),
    "twice": Fault(
        "GAV201", swap_first((", y)\n", ", y) / K\n"), ("loss.backward()", "(loss / K).backward()")), (1, 1)
    ),
    "multiplied": Fault("GAV201", swap((" / K", " * K")), (1, 1)),
    # the full batch's run divides by it as well
    "constant": Fault("GAV201", swap((" / K", " / 8")), (1, 1)),
    "step_each": Fault("GAV601", chain(drop("if .i"), outdent(r"\.step|zero_grad|scaler\.update")), (3, 4)),
    "step_outside": Fault(
        "GAV601",
        outdent(r"optimizer\.step|zero_grad"),
        (2, 2),
        insert("print(f'batch {i + 1}: loss {loss.item():.4f}')", after="== 0:", levels=1),
    ),
    "boundary": Fault("GAV601", swap(("(i + 1) %", "i %"), ("(i+1) %", "i %")), (1, 1)),
    "clear_each": Fault(
        "GAV603", chain(drop("zero_grad"), insert("optimizer.zero_grad()", before="loss = criterion")), (1, 2)
    ),
    "clear_outside": Fault("GAV603", outdent("zero_grad"), (1, 1)),
    "clear_missing": Fault("GAV602", drop("zero_grad"), (0, 1)),
    "leaks": Fault("GAV602", WITHOUT_LAST, (2, 3), WITH_LAST, samples=24),
    "lost": Fault(
        "GAV604",
        chain(WITHOUT_LAST, insert("optimizer.zero_grad()", before=r"for i, \(x")),
        (2, 3),
        WITH_LAST,
        samples=24,
    ),
    "short": Fault("GAV605", swap((IN_WINDOW, "K")), (1, 2), WITH_LAST, samples=24),
    "clip_before_division": Fault(
        "GAV606",
        chain(drop("clip_grad"), insert(CLIP, before="for p in model")),
        (2, 2),
        chain(AVERAGED, insert(CLIP, before=r"optimizer\.step")),
    ),
    "schedule_each": Fault("GAV607", outdent("scheduler"), (1, 1), SCHEDULED, slots=SCHEDULER),
    "counter": Fault(
        "GAV609",
        outdent("updates [+]= 1"),
        (1, 1),
        chain(insert(RATE, before=r"optimizer\.step"), insert("updates += 1", after="zero_grad")),
        slots={"setup": "updates = 0"},
    ),
    "batchnorm": Fault(
        "GAV101",
        chain(),
        (1, 1),
        slots=NORMALISED,
        wrong_slots={slot: line.replace("LayerNorm", "BatchNorm1d") for slot, line in NORMALISED.items()},
        unsafe=True,
    ),
    "samples": Fault(
        "GAV202",
        swap((" * len(xs) / len(x)", " / K")),
        (1, 1),
        swap((" / K", " * len(xs) / len(x)")),
        PARTS,
        sizes=(16, 3),
    ),
    "tokens": Fault(
        "GAV202",
        swap((" * (ys != -100).sum() / (y != -100).sum()", " / K")),
        (1, 1),
        swap((" / K", " * (ys != -100).sum() / (y != -100).sum()")),
        PARTS,
        IGNORED,
        sizes=(16, 4),
    ),
    "tokens_of_window": Fault("GAV202", lambda _: LOOP, (4, 8), COUNTED, LOOP, IGNORED),
    "unscale_each": Fault(
        "GAV608",
        chain(
            drop(r"scaler\.(unscale_|update)"),
            insert("scaler.unscale_(optimizer)", before="if .i"),
            insert("scaler.update()", after="zero_grad"),
            outdent(r"scaler\.update"),
        ),
        (2, 2),
        chain(insert("scaler.unscale_(optimizer)", before=r"scaler\.step"), insert(CLIP, before=r"scaler\.step")),
    ),
    "accelerated_twice": Fault(
        "GAV201", swap(("backward(loss)", "backward(loss / K)")), (1, 1), drop("sync_grad|clip_grad")
    ),
    "accelerated_clip": Fault("GAV606", chain(drop("if accelerator"), outdent("accelerator.clip")), (1, 2)),
    "lightning_twice": Fault("GAV201", swap(("return loss", "return loss / self.hparams.accumulate")), (1, 1)),
    "count_ignored": Fault("GAV202", swap((', reduction="sum") / kwargs["num_items_in_batch"]', ")")), (1, 2)),
}

WRITTEN = {
    "argparse": "undivided step_each short schedule_each",
    "constants": "twice lost batchnorm",
    "config": "step_outside samples",
    "dataclass": "constant counter",
    "click": "multiplied clear_each leaks clip_before_division",
    "trainer": "clear_outside tokens_of_window",
    "notebook": "boundary clear_missing tokens",
    "scaled": "undivided unscale_each",
    "accelerate": "accelerated_twice accelerated_clip",
    "fabric": "undivided",
    "lightning": "lightning_twice",
    "transformers": "count_ignored",
}


class Run(NamedTuple):
    """What one run is started with."""

    arguments: str = ""
    environment: Mapping[str, str] = {}
    constants: Mapping[str, str] = {}


@dataclass(frozen=True)
class Script:
    """A wrong script, its right twin, and how they are run; the rest as in `Fault`.

    `other` accumulates the same batch over another number of micro-batches, of which no audit knows.
    """

    name: str
    wrong: str
    right: str
    code: str
    lines: tuple[int, int]
    full: Run
    accumulated: Run
    other: Run
    unsafe: bool = False
    hf: bool = False


def fill(frame: str, habit: Habit, slots: Mapping[str, str], samples: int) -> str:
    """The script of an author with lines in its slots; a slot without lines goes."""

    def lines(slot: re.Match[str]) -> str:
        text = slots.get(slot[2], "")
        for old, new in habit.names.items():
            text = re.sub(rf"(?<![\w.'\"]){old}(?!\w)", lambda _, new=new: new, text)
        text = re.sub(r"(?m)^(    )+", lambda levels: habit.indent * (len(levels[0]) // 4), text)
        return textwrap.indent(text.rstrip() + "\n", slot[1]) if text else ""

    return re.sub(r"\bN\b", str(samples), re.sub(r"(?m)^([ \t]*)#: (\w+)\n", lines, frame))


def _write(habit_name: str, fault_name: str) -> Script:
    """The script of an author with a fault."""
    habit, fault = HABITS[habit_name], FAULTS[fault_name]
    frame = (FOLDER / f"{habit_name}.txt").read_text(encoding="utf-8")
    loop = fault.twin(habit.style(fault.loop or habit.loop))
    right = fill(frame, habit, {**fault.slots, "loop": loop}, fault.samples)
    if habit.loop:
        wrong = fill(frame, habit, {**fault.slots, **fault.wrong_slots, "loop": fault.change(loop)}, fault.samples)
    else:
        wrong = fault.change(right)
    runs = []
    for batch, accum in ((16, 1), fault.sizes, (16, 7) if fault.loop == PARTS else (2, 8)):
        started = habit.run.format(batch=batch, accum=accum)
        constants = dict(word.split("=") for word in started.split()) if habit.constants else {}
        runs.append(Run(constants=constants) if habit.constants else Run(started))
    return Script(
        f"{habit_name} {fault_name}",
        wrong,
        right,
        fault.code,
        fault.lines,
        *runs,
        fault.unsafe,
        habit.hf,
    )


class Stranger(NamedTuple):
    """A script in its own form.

    Args:
        code: What an audit calls its fault.
        repair: What is replaced by what to make it right.
        lines: How many lines a patch may take out, and put in.
        run: The arguments of a run, or the variables or constants.
        by: How the run is told.
    """

    code: str
    repair: tuple[tuple[str, str], ...]
    lines: tuple[int, int]
    run: str
    by: str = "arguments"


STRANGERS = {
    "counted_from_one": Stranger("GAV601", (("(n + 1)", "n"),), (1, 1), "-b {batch} -k {accum}"),
    "closures": Stranger("GAV201", ((" ** 2", ""),), (1, 1), "--mb {batch} --grad-steps {accum}"),
    "train_step": Stranger(
        "GAV603",
        (("    opt.zero_grad()\n", ""), ("        opt.step()\n", "        opt.step()\n        opt.zero_grad()\n")),
        (1, 2),
        "--rows {batch} --accum {accum}",
    ),
    "early_continue": Stranger(
        "GAV606",
        (
            ("    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)   # avoids explosions\n", ""),
            (
                "    optimizer.step()\n",
                "    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n    optimizer.step()\n",
            ),
        ),
        (1, 1),
        "per_step={batch} accumulate_grad_batches={accum}",
        "constants",
    ),
    "one_line": Stranger("GAV201", (("l.backward()", "(l / S).backward()"),), (1, 1), "{batch} {accum}"),
    "counter": Stranger(
        "GAV605",
        (
            ("    pending = 0\n    for given", "    pending = done = 0\n    for given"),
            (" / config['accumulation']", " / min(config['accumulation'], len(chunks) - done)"),
            ("            pending = 0\n", "            done, pending = done + pending, 0\n"),
        ),
        (2, 3),
        "--per-gpu-batch-size {batch} --accumulation {accum}",
    ),
    "terms": Stranger(
        "GAV201",
        (("hp.aux * l2 ", "hp.aux * l2 / hp.n_accum "),),
        (1, 1),
        "MICRO={batch} N_ACCUM={accum}",
        "environment",
    ),
}


def _read(name: str) -> Script:
    """A script in its own form."""
    stranger = STRANGERS[name]
    wrong = right = (FOLDER / "strangers" / f"{name}.txt").read_text(encoding="utf-8")
    for old, new in stranger.repair:
        assert right.count(old) == 1, (name, old, right.count(old))
        right = right.replace(old, new)
    runs = []
    for batch, accum in ((16, 1), (4, 4), (2, 8)):
        started = stranger.run.format(batch=batch, accum=accum)
        given = started if stranger.by == "arguments" else dict(word.split("=") for word in started.split())
        runs.append(Run(**{stranger.by: given}))
    return Script(f"stranger {name}", wrong, right, stranger.code, stranger.lines, *runs)


SCRIPTS = [_write(habit, fault) for habit, faults in WRITTEN.items() for fault in faults.split()]
SCRIPTS += map(_read, STRANGERS)
