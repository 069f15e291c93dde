"""Proposals of patches for scripts whose calls were recorded at given lines; each fault's repair is among the first."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_loops import FILE, HEAD, LOOP, context_of, finding_of

from gaverify.patches import apply, propose


def changes_of(text: str, code: str, **values: object) -> list[list[str]]:
    """The lines that each proposal takes away and puts in."""
    context = context_of(text)
    patches = list(propose([finding_of(code, **values)], context))
    for patch in patches:
        assert set(apply(patch, {FILE: text})) == {FILE}
    lines = [patch.diff.splitlines() for patch in patches]
    return [[line for line in diff if line[:1] in "+-" and line[:3] not in ("+++", "---")] for diff in lines]


def changed(*pairs: tuple[str, str], loop: str = LOOP) -> str:
    for before, after in pairs:
        assert before in loop, before
        loop = loop.replace(before, after)
    return HEAD + loop


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
    assert changes_of(text, "GAV201", factor=4.0)[0] == [f"-    {differentiated}", f"+    {repaired}"]


def test_number_of_micro_batches_is_explained_where_it_has_no_name() -> None:
    text = changed((" / accumulation_steps  #", "  #"), ("accumulation_steps", "4")).removeprefix(HEAD)
    line = "+    (loss / 4).backward()  # 4 = micro-batches per update"
    assert changes_of(text, "GAV201", factor=4.0)[0] == ["-    loss.backward()", line]


@pytest.mark.parametrize(
    ("line", "repaired"),
    [
        ("    (loss / accumulation_steps).backward()", "    loss.backward()"),
        ("    loss /= accumulation_steps\n    loss.backward()", "    loss.backward()"),
        ("    loss = loss / accumulation_steps\n    loss.backward()", "    loss.backward()"),
        ("    loss.div_(accumulation_steps)\n    loss.backward()", "    loss.backward()"),
        ("    scaler.scale(loss / accumulation_steps).backward()", "    scaler.scale(loss).backward()"),
        ("    (loss * (1 / accumulation_steps)).backward()", "    (loss).backward()"),
    ],
)
def test_second_division_is_removed(line: str, repaired: str) -> None:
    text = changed(("    loss.backward()", line))
    wanted = changed(("    loss.backward()", repaired))
    context = context_of(text)
    results = [apply(patch, {FILE: text})[FILE] for patch in propose([finding_of("GAV201", factor=0.25)], context)]
    assert wanted in results


@pytest.mark.parametrize(
    "test",
    ["i % accumulation_steps == 0", "i % accumulation_steps == 1", "i % accumulation_steps == 0 and i > 0"],
)
def test_boundary_counts_the_rounds_that_are_over(test: str) -> None:
    right = "    if (i + 1) % accumulation_steps == 0:"
    text = changed(("(i + 1) % accumulation_steps == 0", test))
    assert [f"-    if {test}:", f"+{right}"] in changes_of(text, "GAV601")[:2]


def test_boundary_of_a_count_from_one() -> None:
    text = changed(("enumerate(loader)", "enumerate(loader, start=1)"))
    wanted = ["-    if (i + 1) % accumulation_steps == 0:", "+    if i % accumulation_steps == 0:"]
    assert changes_of(text, "GAV601")[0] == wanted


def test_boundary_that_skips_rounds() -> None:
    loop = LOOP.replace(
        "    if (i + 1) % accumulation_steps == 0:", "    if i % accumulation_steps != 0:\n        continue"
    )
    loop = loop.replace("        clip", "    clip").replace("        opt", "    opt").replace("        sch", "    sch")
    wanted = ["-    if i % accumulation_steps != 0:", "+    if (i + 1) % accumulation_steps != 0:"]
    assert changes_of(HEAD + loop, "GAV601")[0] == wanted


STEP, CLIP = "        optimizer.step()\n", "        clip_grad_norm_(model.parameters(), 1.0)\n"
CLEAR, SCHEDULE = "        optimizer.zero_grad()\n", "        scheduler.step()\n"
TEST = "    if (i + 1) % accumulation_steps == 0:\n"


def test_step_goes_into_the_test_behind_the_clipping() -> None:
    text = changed((STEP, ""), (TEST, "    optimizer.step()\n" + TEST))
    assert changes_of(text, "GAV601")[0] == ["-    optimizer.step()", "+        optimizer.step()"]
    repaired = apply(next(propose([finding_of("GAV601")], context_of(text))), {FILE: text})[FILE]
    assert repaired == changed()


def test_loop_without_a_test_gets_one_and_a_count() -> None:
    loop = HEAD + "for x, y in loader:\n    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"
    assert changes_of(loop, "GAV603")[0] == [
        "-for x, y in loader:",
        "-    optimizer.zero_grad()",
        "+for i, (x, y) in enumerate(loader):",
        "-    optimizer.step()",
        "+    if (i + 1) % accumulation_steps == 0:",
        "+        optimizer.step()",
        "+        optimizer.zero_grad()",
    ]


def test_clearing_goes_behind_the_step() -> None:
    text = changed((CLEAR, ""), ("    loss = c", "    optimizer.zero_grad()\n    loss = c"))
    wanted = ["-    optimizer.zero_grad()", "+        optimizer.zero_grad()"]
    assert changes_of(text, "GAV603")[0] == wanted


def test_second_clearing_is_removed() -> None:
    text = changed(("    loss = c", "    model.zero_grad()\n    loss = c"))
    assert changes_of(text, "GAV603")[0] == ["-    model.zero_grad()"]


@pytest.mark.parametrize(
    ("step", "clearing"),
    [
        ("        optimizer.step()\n", "        optimizer.zero_grad()"),
        ("        scaler.step(optimizer)\n        scaler.update()\n", "        optimizer.zero_grad()"),
    ],
)
def test_missing_clearing_is_added(step: str, clearing: str) -> None:
    text = changed((CLEAR, ""), (STEP, step))
    assert changes_of(text, "GAV602")[0] == [f"+{clearing}"]
    repaired = apply(next(propose([finding_of("GAV602")], context_of(text))), {FILE: text})[FILE]
    assert step + clearing in repaired


def test_clipping_goes_before_the_step() -> None:
    text = changed((CLIP, ""), (TEST, "    clip_grad_norm_(model.parameters(), 1.0)\n" + TEST))
    repaired = apply(next(propose([finding_of("GAV606")], context_of(text))), {FILE: text})[FILE]
    assert repaired == changed()


def test_clipping_moves_with_its_test_and_its_scaler() -> None:
    early = "    scaler.unscale_(optimizer)\n    if args.clip:\n        clip_grad_norm_(model.parameters(), 1.0)\n"
    text = changed((CLIP, ""), (TEST, early + TEST))
    moved = "".join(f"    {line}\n" for line in early.splitlines())
    repaired = apply(next(propose([finding_of("GAV606")], context_of(text))), {FILE: text})[FILE]
    assert repaired == changed((CLIP, moved))


def test_schedule_goes_behind_the_step() -> None:
    text = changed((SCHEDULE, ""), (TEST, "    scheduler.step()\n" + TEST))
    repaired = apply(next(propose([finding_of("GAV607")], context_of(text))), {FILE: text})[FILE]
    assert repaired == changed()


def test_short_window_is_stepped_and_divided_by_its_size() -> None:
    assert changes_of(changed(), "GAV604")[0] == [
        "-    loss = criterion(model(x), y) / accumulation_steps  # 'the mean'",
        "+    loss = criterion(model(x), y) / min(accumulation_steps, len(loader) - i // accumulation_steps * "
        "accumulation_steps)  # 'the mean'",
        "-    if (i + 1) % accumulation_steps == 0:",
        "+    if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):",
    ]


def test_unknown_shapes_get_no_proposal() -> None:
    text = "engine = Engine(model)\nengine.fit(loader)\n"
    for code in ("GAV201", "GAV601", "GAV602", "GAV603", "GAV604", "GAV605", "GAV606", "GAV607", "GAV608", "GAV999"):
        assert changes_of(text, code, factor=4.0) == []


def test_line_ends_of_windows_are_kept(tmp_path: Path) -> None:
    text = changed((CLEAR, "")).replace("\n", "\r\n")
    patch = next(propose([finding_of("GAV602")], context_of(text)))
    assert apply(patch, {FILE: text})[FILE].count("\r\n") == text.count("\r\n") + 1


INNER = """accumulation_steps = 4
for batch, answers in loader:
    for x, y in zip(batch.split(2), answers.split(2)):
        loss = F.cross_entropy(model(x), y.view(-1)) / accumulation_steps
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_parts_of_a_batch_count_by_their_share_of_its_targets() -> None:
    assert changes_of(INNER, "GAV202")[0] == [
        "-        loss = F.cross_entropy(model(x), y.view(-1)) / accumulation_steps",
        "+        loss = F.cross_entropy(model(x), y.view(-1)) * (y != -100).sum() / (answers != -100).sum()",
    ]


def test_index_that_the_loss_ignores_is_counted() -> None:
    text = INNER.replace("y.view(-1))", "y.view(-1), ignore_index=PAD)")
    assert "(y != PAD).sum() / (answers != PAD).sum()" in changes_of(text, "GAV202")[0][1]


def test_slices_of_a_batch_count_by_their_share_of_its_samples() -> None:
    cut = "for start in range(0, len(batch), 3):\n        x, y = batch[start : start + 3], answers[start : start + 3]"
    text = INNER.replace("for x, y in zip(batch.split(2), answers.split(2)):", cut)
    proposed = [lines[1] for lines in changes_of(text, "GAV202")]
    assert any(line.endswith("* len(y) / len(answers)") for line in proposed)


def test_list_of_micro_batches_counts_each_of_them() -> None:
    text = INNER.replace("for batch, answers in loader", "for batches in loader")
    text = text.replace("for x, y in zip(batch.split(2), answers.split(2))", "for micro in batches")
    text = text.replace("model(x), y.view(-1)", "model(micro), micro['labels']")
    total = "sum((micro['labels'] != -100).sum() for micro in batches)"
    assert changes_of(text, "GAV202")[0][1].endswith(f"* (micro['labels'] != -100).sum() / {total}")


def test_gradient_is_divided_at_the_step_where_the_total_is_not_known_before() -> None:
    text = changed(("criterion(model(x), y)", "F.cross_entropy(model(x), y)"))
    assert changes_of(text, "GAV202")[0] == [
        "+window_targets = 0",
        "-    loss = F.cross_entropy(model(x), y) / accumulation_steps  # 'the mean'",
        "-    loss.backward()",
        "+    loss = F.cross_entropy(model(x), y)  # 'the mean'",
        "+    (loss * (y != -100).sum()).backward()",
        "+    window_targets += (y != -100).sum()",
        "+        for group in optimizer.param_groups:",
        '+            for parameter in group["params"]:',
        "+                if parameter.grad is not None:",
        "+                    parameter.grad /= window_targets",
        "+        window_targets = 0",
    ]


def test_trainer_counts_the_items_of_all_micro_batches() -> None:
    text = """class MyTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = F.cross_entropy(model(inputs), inputs["labels"])
        return loss
"""
    line = '+        loss = F.cross_entropy(model(inputs), inputs["labels"], reduction="sum") / num_items_in_batch'
    assert changes_of(text, "GAV202")[0][1] == line


ACCELERATED = """accelerator = Accelerator(ARGUMENTS)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(criterion(model(x), y))
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "gradient_accumulation_steps=accumulation_steps"),
        ("cpu=True", "cpu=True, gradient_accumulation_steps=accumulation_steps"),
        ("gradient_accumulation_steps=1", "gradient_accumulation_steps=accumulation_steps"),
    ],
)
def test_accelerator_is_told_the_number_of_micro_batches(arguments: str, told: str) -> None:
    text = HEAD + ACCELERATED.replace("ARGUMENTS", arguments)
    assert changes_of(text, "GAV601")[0][1] == f"+accelerator = Accelerator({told})"


def test_clipping_waits_for_the_accelerator() -> None:
    clip = "        clip_grad_norm_(model.parameters(), 1.0)"
    text = HEAD + ACCELERATED.replace("ARGUMENTS", "gradient_accumulation_steps=accumulation_steps")
    assert changes_of(text, "GAV606")[0] == [f"-{clip}", "+        if accelerator.sync_gradients:", f"+    {clip}"]


def test_batch_norm_is_replaced_behind_the_last_assignment_of_the_model() -> None:
    text = "import torch\n\nnet = Net()\nnet = net.cuda()\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    (patch,) = propose([finding_of("GAV101")], context_of(text))
    assert patch.unsafe
    assert apply(patch, {FILE: text})[FILE] == text.replace(
        "import torch\n", "import torch\nfrom gaverify.remedies import convert_batch_norm\n"
    ).replace("net.cuda()\n", "net.cuda()\nnet = convert_batch_norm(net)\n")


def test_term_that_is_not_divided() -> None:
    text = changed(
        ("criterion(model(x), y) / accumulation_steps", "criterion(model(x), y) / accumulation_steps + 2 * p")
    )
    line = "+    loss = criterion(model(x), y) / accumulation_steps + 2 * p / accumulation_steps  # 'the mean'"
    assert changes_of(text, "GAV201", factor=4.0, term=2)[0][1] == line


@pytest.mark.parametrize(
    ("test", "right"),
    [
        ("if i % accumulation_steps:", "if (i + 1) % accumulation_steps:"),
        ("if count > accumulation_steps:", "if count == accumulation_steps:"),
    ],
)
def test_other_tests_of_a_boundary(test: str, right: str) -> None:
    text = changed(("if (i + 1) % accumulation_steps == 0:", test))
    assert changes_of(text, "GAV601")[0] == [f"-    {test}", f"+    {right}"]


def test_clearing_joins_a_step_on_one_line() -> None:
    text = HEAD + "for i, x in enumerate(loader):\n    model(x).backward()\n    if (i + 1) % 4 == 0: optimizer.step()\n"
    assert changes_of(text, "GAV602")[0][1] == "+    if (i + 1) % 4 == 0: optimizer.step(); optimizer.zero_grad()"


def test_update_in_a_function_is_called_where_a_window_ends() -> None:
    text = """class Loop:
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
    assert changes_of(text, "GAV601")[0] == [
        "-        self.update()",
        "+        if (at + 1) % accumulation_steps == 0:",
        "+            self.update()",
    ]


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        ("nn.BatchNorm1d(16)", "nn.GroupNorm(4, 16)"),
        ("torch.nn.BatchNorm2d(width, eps=1e-3, momentum=0.05)", "torch.nn.GroupNorm(1, width, eps=1e-3)"),
        ("nn.BatchNorm2d(num_features=256, affine=False)", "nn.GroupNorm(32, 256, affine=False)"),
        ("nn.BatchNorm1d(3)", "nn.GroupNorm(1, 3)"),
    ],
)
def test_layer_with_batch_statistics_becomes_one_of_groups(layer: str, wanted: str) -> None:
    patch = next(propose([finding_of("GAV101")], context_of(f"norm = {layer}  # keeps scale\n")))
    assert patch.unsafe
    assert f"+norm = {wanted}  # keeps scale" in patch.diff.splitlines()


@pytest.mark.parametrize("layer", ["BatchNorm1d(16)", "nn.BatchNorm1d(*sizes)", "nn.BatchNorm1d(**settings)"])
def test_layer_whose_channels_or_package_are_not_in_the_text_stays(layer: str) -> None:
    assert not list(propose([finding_of("GAV101")], context_of(f"first = nn.BatchNorm1d(8)\nnorm = {layer}\n")))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("criterion(model(x), y) * accumulation_steps", "criterion(model(x), y) / accumulation_steps"),
        ("(criterion(model(x), y)) * accumulation_steps", "(criterion(model(x), y)) / accumulation_steps"),
    ],
)
def test_loss_is_divided_where_it_is_multiplied(before: str, after: str) -> None:
    text = changed(("criterion(model(x), y) / accumulation_steps", before))
    assert changes_of(text, "GAV201", factor=16.0)[0][1] == f"+    loss = {after}  # 'the mean'"


@pytest.mark.parametrize("divisor", ["k ** 2", "(k * 2)", "max(k - 1, 1)"])
def test_divisor_that_is_made_of_the_number_of_micro_batches(divisor: str) -> None:
    text = changed(("criterion(model(x), y) / accumulation_steps", f"criterion(model(x), y) / {divisor}"))
    wanted = "criterion(model(x), y) / (k)" if divisor.startswith("(") else "criterion(model(x), y) / k"
    proposed = [line for lines in changes_of(text, "GAV201", factor=0.25) for line in lines]
    assert f"+    loss = {wanted}  # 'the mean'" in proposed


def test_counter_behind_a_setting_counts_updates() -> None:
    line = "updates += 1  # for the decay"
    text = f"{changed()}    {line}\n"
    assert changes_of(text, "GAV609")[0] == [f"-    {line}", f"+        {line}"]


def test_update_behind_a_test_goes_into_it() -> None:
    text = (
        HEAD
        + """for i, (x, y) in enumerate(loader):
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        print(i)
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    wanted = ["-    optimizer.step()", "-    optimizer.zero_grad()"]
    wanted += ["+        optimizer.step()", "+        optimizer.zero_grad()"]
    assert changes_of(text, "GAV601")[0] == wanted


def test_scaler_is_used_once_per_update_around_the_clipping() -> None:
    scaled = changed((STEP, "        scaler.step(optimizer)\n        scaler.update()\n"))
    right = scaled.replace(CLIP, f"        scaler.unscale_(optimizer)\n{CLIP}")
    update, unscale = "        scaler.update()\n", "        scaler.unscale_(optimizer)\n"
    wrong = right.replace(update, "").replace(unscale, "").replace(TEST, unscale[4:] + TEST) + update[4:]
    patch = next(propose([finding_of("GAV608")], context_of(wrong)))
    assert apply(patch, {FILE: wrong})[FILE] == right


def test_option_that_nothing_uses_yet_is_the_name_of_k() -> None:
    head = "parser.add_argument('--grad-accum', type=int)\nargs = parser.parse_args()\n"
    text = head + "for x, y in loader:\n    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    assert "+    if (i + 1) % args.grad_accum == 0:" in changes_of(text, "GAV601")[0]


def test_update_is_not_moved_behind_an_epoch() -> None:
    text = HEAD + "for epoch in range(3):\n    for x in loader:\n        loss.backward()\n        optimizer.step()\n"
    lines = [line for lines in changes_of(text, "GAV601") for line in lines]
    assert "+        if (i + 1) % accumulation_steps == 0:" in lines
    assert "+    optimizer.step()" not in lines


def test_micro_batch_without_targets_is_summed() -> None:
    line = '+        loss = F.cross_entropy(model(x), y.view(-1), reduction="sum") / (answers != -100).sum()'
    assert changes_of(INNER, "GAV203")[0][1] == line


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        ("GAV607", ["scheduler.step()", "other_scheduler.step()"]),
        ("GAV603", ["net.zero_grad()", "optimizer.zero_grad()"]),
    ],
)
def test_two_calls_of_every_micro_batch_move_at_once(code: str, calls: list[str]) -> None:
    test = "    if (i + 1) % accumulation_steps == 0:\n        optimizer.step()\n"
    beside = "".join(f"    {call}\n" for call in calls)
    first, last = (beside, "") if code == "GAV603" else ("", beside)
    text = f"{HEAD}for i, (x, y) in enumerate(loader):\n{first}    loss.backward()\n{test}{last}"
    moved = "".join(f"        {call}\n" for call in calls)
    wanted = text.replace(beside, "").replace(test, test + moved)
    patches = propose([finding_of(code)], context_of(text))
    assert wanted in [apply(patch, {FILE: text})[FILE] for patch in patches]


def test_end_of_a_window_may_be_handed_to_a_function() -> None:
    text = """def one(batch, is_last):
    optimizer.zero_grad()
    model(batch).backward()
    if is_last:
        optimizer.step()

for i, batch in enumerate(loader):
    one(batch, is_last=(i + 1) % 4 == 0)
"""
    assert changes_of(text, "GAV603")[0] == ["-    optimizer.zero_grad()", "+        optimizer.zero_grad()"]
