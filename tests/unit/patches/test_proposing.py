"""Proposals of patches for scripts whose calls were recorded at given lines; each fault's repair is among the first."""

from __future__ import annotations

import textwrap

import pytest
from recorded_loops import FILE, HEAD, LOOP, context_of, finding_of

from gaverify.patches import apply, propose

RIGHT = HEAD + LOOP
STEP, CLIP = "        optimizer.step()\n", "        clip_grad_norm_(model.parameters(), 1.0)\n"
CLEAR, SCHEDULE = "        optimizer.zero_grad()\n", "        scheduler.step()\n"
TEST, LOSS = "    if (i + 1) % accumulation_steps == 0:\n", "    loss = criterion(model(x), y) / accumulation_steps"
UPDATE, UNSCALE = "        scaler.update()\n", "        scaler.unscale_(optimizer)\n"
BACKWARD = "    loss.backward()\n"
CLIP_IF = f"        if args.clip:\n    {CLIP}"


def repairs(text: str, code: str, **values: object) -> list[str]:
    """The text after each patch that is proposed."""
    patches = list(propose([finding_of(code, **values)], context_of(text)))
    return [apply(patch, {FILE: text})[FILE] for patch in patches]


def changed(*pairs: tuple[str, str], text: str = RIGHT) -> str:
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize(
    ("differentiated", "repaired"),
    [
        ("loss.backward()", "(loss / accumulation_steps).backward()"),
        ("criterion(model(x), y).backward()", "(criterion(model(x), y) / accumulation_steps).backward()"),
        ("(a + b).backward()", "((a + b) / accumulation_steps).backward()"),
        ("(2 * a).backward()", "(2 * a / accumulation_steps).backward()"),
        ("scaler.scale(loss).backward()", "scaler.scale(loss / accumulation_steps).backward()"),
        ("scaler.scale(a + b).backward()", "scaler.scale((a + b) / accumulation_steps).backward()"),
        ("accelerator.backward(loss)", "accelerator.backward(loss / accumulation_steps)"),
        ("torch.autograd.backward(loss)", "torch.autograd.backward(loss / accumulation_steps)"),
        ("self.manual_backward(loss)", "self.manual_backward(loss / accumulation_steps)"),
        ("loss.backward(retain_graph=True)", "(loss / accumulation_steps).backward(retain_graph=True)"),
        ("losses['é'].backward()", "(losses['é'] / accumulation_steps).backward()"),
    ],
)
def test_loss_is_divided(differentiated: str, repaired: str) -> None:
    text = changed((" / accumulation_steps  #", "  #"), ("loss.backward()", differentiated))
    assert repairs(text, "GAV201", factor=4.0)[0] == changed((differentiated, repaired), text=text)


def test_number_of_micro_batches_is_explained_where_it_has_no_name() -> None:
    text = changed((" / accumulation_steps  #", "  #"), (HEAD, ""), ("accumulation_steps", "4"))
    line = "    (loss / 4).backward()  # 4 = micro-batches per update\n"
    assert repairs(text, "GAV201", factor=4.0)[0] == changed((BACKWARD, line), text=text)


@pytest.mark.parametrize(
    ("line", "repaired"),
    [
        ("    (loss / accumulation_steps).backward()\n", BACKWARD),
        ("    loss /= accumulation_steps\n    loss.backward()\n", BACKWARD),
        ("    loss = loss / accumulation_steps\n    loss.backward()\n", BACKWARD),
        ("    loss.div_(accumulation_steps)\n    loss.backward()\n", BACKWARD),
        ("    scaler.scale(loss / accumulation_steps).backward()\n", "    scaler.scale(loss).backward()\n"),
        ("    (loss * (1 / accumulation_steps)).backward()\n", "    (loss).backward()\n"),
    ],
)
def test_second_division_is_removed(line: str, repaired: str) -> None:
    assert changed((BACKWARD, repaired)) in repairs(changed((BACKWARD, line)), "GAV201", factor=0.25)


@pytest.mark.parametrize(
    ("before", "after", "factor"),
    [
        ("criterion(model(x), y) * accumulation_steps", "criterion(model(x), y) / accumulation_steps", 16.0),
        ("(criterion(model(x), y)) * accumulation_steps", "(criterion(model(x), y)) / accumulation_steps", 16.0),
        ("criterion(model(x), y) / k ** 2", "criterion(model(x), y) / k", 0.25),
        ("criterion(model(x), y) / (k * 2)", "criterion(model(x), y) / (k)", 0.25),
        ("criterion(model(x), y) / max(k - 1, 1)", "criterion(model(x), y) / k", 0.25),
    ],
)
def test_divisor_becomes_the_number_of_micro_batches(before: str, after: str, factor: float) -> None:
    right = "criterion(model(x), y) / accumulation_steps"
    proposed = repairs(changed((right, before)), "GAV201", factor=factor)
    assert changed((right, after)) in (proposed[:1] if factor > 1 else proposed)


def test_term_that_is_not_divided() -> None:
    text = changed((LOSS, LOSS + " + 2 * p"))
    assert repairs(text, "GAV201", factor=4.0, term=2)[0] == changed((LOSS, LOSS + " + 2 * p / accumulation_steps"))


FROM_ONE = changed(("enumerate(loader)", "enumerate(loader, start=1)"))
BEHIND = "    if i % accumulation_steps != 0:\n        continue\n"
SKIPPING = changed((TEST, BEHIND), *((line, line[4:]) for line in (CLIP, STEP, SCHEDULE, CLEAR)))


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        (RIGHT, "if i % accumulation_steps == 0:", TEST[4:-1]),
        (RIGHT, "if i % accumulation_steps == 1:", TEST[4:-1]),
        (RIGHT, "if i % accumulation_steps == 0 and i > 0:", TEST[4:-1]),
        (RIGHT, "if i % accumulation_steps:", "if (i + 1) % accumulation_steps:"),
        (RIGHT, "if count > accumulation_steps:", "if count == accumulation_steps:"),
        (FROM_ONE, TEST[4:-1], "if i % accumulation_steps == 0:"),
        (SKIPPING, "if i % accumulation_steps != 0:", "if (i + 1) % accumulation_steps != 0:"),
    ],
)
def test_boundary_counts_the_rounds_that_are_over(text: str, wrong: str, right: str) -> None:
    if wrong not in text:
        text = changed((TEST, f"    {wrong}\n"), text=text)
    assert changed((wrong, right), text=text) in repairs(text, "GAV601")[:2]


def earlier(*lines: str) -> list[tuple[str, str]]:
    """Moves lines of the update before its test."""
    return [*((line, "") for line in lines), (TEST, textwrap.indent(textwrap.dedent("".join(lines)), "    ") + TEST)]


SCALED = changed((STEP, "        scaler.step(optimizer)\n" + UPDATE), (CLIP, UNSCALE + CLIP))
UNSCALED = changed((CLIP, UNSCALE + CLIP_IF))
NEVER_CLEARED = changed((UPDATE + SCHEDULE + CLEAR, UPDATE), text=SCALED)
SCALED_EARLY = changed((UPDATE, ""), (UNSCALE, ""), (TEST, UNSCALE[4:] + TEST), text=SCALED) + UPDATE[4:]
CLEARED_AT_ONCE = changed((CLEAR, ""), (STEP, STEP + CLEAR))


@pytest.mark.parametrize(
    ("code", "wrong", "right"),
    [
        ("GAV601", changed(*earlier(STEP)), RIGHT),
        ("GAV602", changed((CLEAR, "")), CLEARED_AT_ONCE),
        ("GAV602", NEVER_CLEARED, NEVER_CLEARED + CLEAR),
        ("GAV603", changed((CLEAR, ""), (LOSS, CLEAR[4:] + LOSS)), CLEARED_AT_ONCE),
        ("GAV603", changed((LOSS, "    model.zero_grad()\n" + LOSS)), RIGHT),
        ("GAV606", changed(*earlier(CLIP)), RIGHT),
        ("GAV606", changed(*earlier(UNSCALE, CLIP_IF), text=UNSCALED), UNSCALED),
        ("GAV607", changed(*earlier(SCHEDULE)), RIGHT),
        ("GAV608", SCALED_EARLY, SCALED),
        ("GAV609", f"{RIGHT}    updates += 1  # decay\n", f"{RIGHT}        updates += 1  # decay\n"),
    ],
)
def test_call_of_every_micro_batch_moves_to_the_update(code: str, wrong: str, right: str) -> None:
    assert repairs(wrong, code)[0] == right


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        ("GAV607", SCHEDULE + SCHEDULE.replace("scheduler", "other_scheduler")),
        ("GAV603", CLEAR.replace("optimizer", "net") + CLEAR),
    ],
    ids=["schedules", "clearings"],
)
def test_two_calls_of_every_micro_batch_move_at_once(code: str, calls: str) -> None:
    start, beside = f"{HEAD}for i, (x, y) in enumerate(loader):\n", textwrap.indent(textwrap.dedent(calls), "    ")
    text = start + (BACKWARD + TEST + STEP + beside if code == "GAV607" else beside + BACKWARD + TEST + STEP)
    assert start + BACKWARD + TEST + STEP + calls in repairs(text, code)


def test_short_window_is_stepped_and_divided_by_its_size() -> None:
    size = "min(accumulation_steps, len(loader) - i // accumulation_steps * accumulation_steps)"
    wanted = changed(("/ accumulation_steps  #", f"/ {size}  #"), (" == 0:", " == 0 or i + 1 == len(loader):"))
    assert repairs(RIGHT, "GAV604")[0] == wanted


def test_unknown_shapes_get_no_proposal() -> None:
    text = "engine = Engine(model)\nengine.fit(loader)\n"
    for code in ("GAV201", "GAV601", "GAV602", "GAV603", "GAV604", "GAV605", "GAV606", "GAV607", "GAV608", "GAV999"):
        assert repairs(text, code, factor=4.0) == []


def test_line_ends_of_windows_are_kept() -> None:
    text = changed((CLEAR, "")).replace("\n", "\r\n")
    assert repairs(text, "GAV602")[0].count("\r\n") == text.count("\r\n") + 1


# Loops of other forms; each line that changes is a pair.

SIMPLE = "for x, y in loader:\n    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"
LATE = f"{HEAD}for i, (x, y) in enumerate(loader):\n{BACKWARD}{TEST}        print(i)\n{STEP[4:]}{CLEAR[4:]}"
ON_A_LINE = "for i, x in enumerate(loader):\n    model(x).backward()\n    if (i + 1) % 4 == 0: optimizer.step()\n"
IN_A_METHOD = """class Loop:
    def one(self, at, batch, accumulation_steps):
        (model(batch) / accumulation_steps).backward()
        self.update()

    def update(self):
        optimizer.step()
        optimizer.zero_grad()

    def fit(self):
        for i, batch in enumerate(loader):
            self.one(i, batch, 4)
"""
IN_A_FUNCTION = """def one(batch, is_last):
    optimizer.zero_grad()
    model(batch).backward()
    if is_last:
        optimizer.step()

for i, batch in enumerate(loader):
    one(batch, is_last=(i + 1) % 4 == 0)
"""
INNER = """accumulation_steps = 4
for batch, answers in loader:
    for x, y in zip(batch.split(2), answers.split(2)):
        loss = F.cross_entropy(model(x), y.view(-1)) / accumulation_steps
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LISTED = changed(
    ("for batch, answers in loader", "for batches in loader"),
    ("for x, y in zip(batch.split(2), answers.split(2))", "for micro in batches"),
    ("model(x), y.view(-1)", "model(micro), micro['labels']"),
    text=INNER,
)
TRAINER = """class MyTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = F.cross_entropy(model(inputs), inputs["labels"])
        return loss
"""
ACCELERATED = """accumulation_steps = 4
accelerator = Accelerator()
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(criterion(model(x), y))
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""
TOLD = "gradient_accumulation_steps=accumulation_steps"
ASSIGNED = "import torch\n\nnet = Net()\nnet = net.cuda()\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"


def given(code: str, text: str, *pairs: tuple[str, str]) -> tuple[str, str, str]:
    return code, text, changed(*pairs, text=text)


def accelerated(arguments: str) -> str:
    return changed(("Accelerator()", f"Accelerator({arguments})"), text=ACCELERATED)


COUNTED = "for i, (x, y) in enumerate(loader)"
METHOD, AT_THE_END = "        self.update()\n", "        if (at + 1) % accumulation_steps == 0:\n"
SHARE = "(micro['labels'] != -100).sum() / sum((micro['labels'] != -100).sum() for micro in batches)"
PADDED = changed(("y.view(-1))", "y.view(-1), ignore_index=PAD)"), text=INNER)
SUMMED = 'y.view(-1), reduction="sum") / (answers != -100).sum()'
CONVERTED = "import torch\nfrom gaverify.remedies import convert_batch_norm\n"


@pytest.mark.parametrize(
    ("code", "text", "wanted"),
    [
        given("GAV603", HEAD + SIMPLE, (SIMPLE[:18], COUNTED), (CLEAR[4:], ""), (STEP[4:], TEST + STEP + CLEAR)),
        given("GAV601", LATE, (STEP[4:] + CLEAR[4:], STEP + CLEAR)),
        given("GAV602", ON_A_LINE, ("optimizer.step()", "optimizer.step(); optimizer.zero_grad()")),
        given("GAV601", IN_A_METHOD, (METHOD, f"{AT_THE_END}    {METHOD}")),
        given("GAV603", IN_A_FUNCTION, (CLEAR[4:], ""), (STEP, STEP + CLEAR)),
        given("GAV202", INNER, ("/ accumulation_steps", "* (y != -100).sum() / (answers != -100).sum()")),
        given("GAV202", PADDED, ("/ accumulation_steps", "* (y != PAD).sum() / (answers != PAD).sum()")),
        given("GAV202", LISTED, ("/ accumulation_steps", f"* {SHARE}")),
        given("GAV203", INNER, ("y.view(-1)) / accumulation_steps", SUMMED)),
        given("GAV202", TRAINER, ('["labels"])', '["labels"], reduction="sum") / num_items_in_batch')),
        given("GAV601", ACCELERATED, ("Accelerator()", f"Accelerator({TOLD})")),
        given("GAV601", accelerated("cpu=True"), ("cpu=True", f"cpu=True, {TOLD}")),
        given("GAV601", accelerated("gradient_accumulation_steps=1"), ("gradient_accumulation_steps=1", TOLD)),
        given("GAV606", accelerated(TOLD), (CLIP, f"        if accelerator.sync_gradients:\n    {CLIP}")),
        given(
            "GAV101", ASSIGNED, ("import torch\n", CONVERTED), ("cuda()\n", "cuda()\nnet = convert_batch_norm(net)\n")
        ),
    ],
)
def test_loops_of_other_forms(code: str, text: str, wanted: str) -> None:
    assert repairs(text, code)[0] == wanted


def test_slices_of_a_batch_count_by_their_share_of_its_samples() -> None:
    cut = "for start in range(0, len(batch), 3):\n        x, y = batch[start : start + 3], answers[start : start + 3]"
    text = changed(("for x, y in zip(batch.split(2), answers.split(2)):", cut), text=INNER)
    assert changed(("/ accumulation_steps", "* len(y) / len(answers)"), text=text) in repairs(text, "GAV202")


def test_gradient_is_divided_at_the_step_where_the_total_is_not_known_before() -> None:
    cross_entropy = "    loss = F.cross_entropy(model(x), y)"
    text = changed((LOSS, f"{cross_entropy} / accumulation_steps"))
    assert repairs(text, "GAV202")[0] == changed(
        ("for i, ", "window_targets = 0\nfor i, "),
        (f"{cross_entropy} / accumulation_steps", cross_entropy),
        (BACKWARD, "    (loss * (y != -100).sum()).backward()\n    window_targets += (y != -100).sum()\n"),
        (
            CLIP,
            "        for group in optimizer.param_groups:\n"
            '            for parameter in group["params"]:\n'
            "                if parameter.grad is not None:\n"
            f"                    parameter.grad /= window_targets\n        window_targets = 0\n{CLIP}",
        ),
        text=text,
    )


def test_option_that_nothing_uses_yet_is_the_name_of_k() -> None:
    head = "parser.add_argument('--grad-accum', type=int)\nargs = parser.parse_args()\n"
    assert "    if (i + 1) % args.grad_accum == 0:" in repairs(head + SIMPLE, "GAV601")[0].splitlines()


def test_update_is_not_moved_behind_an_epoch() -> None:
    text = HEAD + "for epoch in range(3):\n    for x in loader:\n        loss.backward()\n        optimizer.step()\n"
    proposed = [line for repaired in repairs(text, "GAV601") for line in repaired.splitlines()]
    assert "        if (i + 1) % accumulation_steps == 0:" in proposed
    assert "    optimizer.step()" not in proposed


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        ("nn.BatchNorm1d(16)", ["nn.GroupNorm(4, 16)"]),
        ("torch.nn.BatchNorm2d(width, eps=1e-3, momentum=0.05)", ["torch.nn.GroupNorm(1, width, eps=1e-3)"]),
        ("nn.BatchNorm2d(num_features=256, affine=False)", ["nn.GroupNorm(32, 256, affine=False)"]),
        ("nn.BatchNorm1d(3)", ["nn.GroupNorm(1, 3)"]),
        ("BatchNorm1d(16)", []),
        ("nn.BatchNorm1d(*sizes)", []),
        ("nn.BatchNorm1d(**settings)", []),
    ],
)
def test_layer_with_batch_statistics_becomes_one_of_groups(layer: str, wanted: list[str]) -> None:
    """Where the number of channels and the package stand in the text."""
    patches = list(propose([finding_of("GAV101")], context_of(f"norm = {layer}  # keeps scale\n")))
    assert all(patch.unsafe for patch in patches)
    assert [line for patch in patches[:1] for line in patch.diff.splitlines() if line[:2] == "+n"] == [
        f"+norm = {each}  # keeps scale" for each in wanted
    ]
