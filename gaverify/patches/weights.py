"""Repairs of micro-batches that count wrongly: by their share of the window's samples or targets (GAV202, GAV203).

A mean over the full batch is a mean over all its samples or targets. The mean of K means is another number where
micro-batches have different numbers of them. An inner loop knows the total beforehand; a loop over a loader does not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from gaverify.patches.candidates import Candidate, divide, join_edits
from gaverify.patches.code import Code, Function, Loop, callee_name
from gaverify.patches.loop import LoopModel, Site
from gaverify.patches.placement import find_first_of_update
from gaverify.patches.scale import division_by_steps, find_loss, remove_division, replace_by_factor
from gaverify.records.events import Backward, Step
from gaverify.records.findings import Finding
from gaverify.records.patch import Edit

_LOSSES = ("cross_entropy", "nll_loss", "criterion", "loss_fn", "loss_function", "loss_func", "CrossEntropyLoss")
_POINTWISE = (*_LOSSES, "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")


def repair_shares(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields losses that are weighted by their share of the window."""
    yield from _use_items_of_trainer(model, finding)
    sites = model.find_sites(Backward)
    # Several backward passes divide the window in parts that no common share describes.
    if len(sites) != 1:
        return
    site = sites[0]
    for amount in _list_amounts(model, site):
        yield from _weight_in_inner_loop(model, finding, site, amount)
    for amount in _list_amounts(model, site):
        yield from _divide_at_step(model, finding, site, amount)


@dataclass(frozen=True)
class _Amount:
    """How much a micro-batch counts.

    Args:
        noun: Its name for variables and sentences.
        text: It, as an expression; `{}` stands for the tensor that is counted.
        tensor: That tensor, as an expression.
    """

    noun: str
    text: str
    tensor: str

    def of(self, tensor: str) -> str:
        """The amount of another tensor."""
        return self.text.replace("{}", tensor)


def _list_amounts(model: LoopModel, site: Site) -> list[_Amount]:
    """Returns the counts by which the micro-batches of an update may have to be weighted, the likeliest first."""
    update, loop = model.update, model.micro_loop(site)
    scope: ast.AST = loop or site.code.scope_of(site.call)
    sizes = update.window.sizes if update is not None else ()
    targets = list(_find_targets(site.code, scope))
    counted = [_Amount("targets", text, tensor) for text, tensor in targets]
    counted += [_Amount("weights", code_text, "") for code_text in _find_counted_divisors(model, site, scope)]
    rows = [
        _Amount("samples", "len({})", tensor) for tensor in _find_rows(site.code, loop, [each for _, each in targets])
    ]
    # Where the micro-batches have different sizes, these are the likelier reason.
    return [*rows, *counted] if len(set(sizes)) > 1 else [*counted, *rows]


def _find_targets(code: Code, scope: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields an expression that counts the valid targets of a loss, and the tensor of these targets."""
    ignored = _find_ignored_index(code)
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call) or callee_name(node).rpartition(".")[2] not in _LOSSES or len(node.args) < 2:
            continue
        of_loss = next((code.text_of(each.value) for each in node.keywords if each.arg == "ignore_index"), "")
        target = _strip_shape_calls(node.args[1])
        yield f"({{}} != {of_loss or ignored}).sum()", code.text_of(target)
    # Models of transformers are given labels and compute their loss inside. Causal ones use no first label.
    for node in ast.walk(scope):
        is_labels = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        if is_labels and isinstance(node, ast.Subscript) and code.text_of(node.slice).strip("'\"") == "labels":
            yield "({} != -100).sum()", code.text_of(node)
            yield "({}[:, 1:] != -100).sum()", code.text_of(node)
            return


def _find_ignored_index(code: Code) -> str:
    """The index that the source's losses ignore, as text."""
    for node in ast.walk(code.tree):
        if isinstance(node, ast.Call) and callee_name(node) in ("CrossEntropyLoss", "NLLLoss"):
            return next((code.text_of(each.value) for each in node.keywords if each.arg == "ignore_index"), "-100")
    return "-100"


def _strip_shape_calls(node: ast.expr) -> ast.expr:
    """A tensor without the calls that only change its shape: `y.view(-1)`."""
    while isinstance(node, ast.Call) and callee_name(node) in ("view", "reshape", "flatten", "ravel", "contiguous"):
        if not isinstance(node.func, ast.Attribute):
            break
        node = node.func.value
    return node


def _find_counted_divisors(model: LoopModel, site: Site, scope: ast.AST) -> Iterator[str]:
    """Yields the sums that a loss is divided by: `(losses * mask).sum() / mask.sum()`."""
    for node in ast.walk(scope):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            is_sum = any(callee_name(each) in ("sum", "count_nonzero") for each in ast.walk(node.right))
            # A division by K is no count of this micro-batch.
            if is_sum and division_by_steps(model, site.code, node) is None:
                yield site.code.operand(node.right)


def _find_rows(code: Code, loop: Loop | None, targets: list[str]) -> Iterator[str]:
    """Yields tensors whose length is the number of samples of a micro-batch."""
    if loop is None:
        return
    target = loop.target if isinstance(loop, ast.For | ast.AsyncFor) else None
    names = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)] if target is not None else []
    keys = [
        code.text_of(node)
        for node in ast.walk(loop)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in names
        and isinstance(node.slice, ast.Constant)
    ]
    sliced = [
        each.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign)
        for target in node.targets
        for each in ast.walk(target)
        if isinstance(each, ast.Name) and any(name in code.text_of(node.value) for name in names)
    ]
    # Two guesses are enough: each costs a trial.
    yield from list(dict.fromkeys([*keys[:1], *targets[:1], *sliced[:1], *names[-1:]]))[:2]


# An inner loop over the parts of one batch: the total is known before its first micro-batch.


def _weight_in_inner_loop(model: LoopModel, finding: Finding, site: Site, amount: _Amount) -> Iterator[Candidate]:
    """Yields losses times their share, in an inner loop whose whole batch has a name."""
    code, loop = site.code, model.micro_loop(site)
    if not isinstance(loop, ast.For) or not amount.tensor:
        return
    total = _write_total(code, loop, amount)
    if not total:
        return
    # A mean over no targets is NaN, and stays so times zero.
    if finding.code == "GAV203" or (model.update is not None and 0 in model.update.window.valid_targets):
        yield from _sum_in_inner_loop(model, site, total)
    share = f"{amount.of(amount.tensor)} / {total}"
    edit = _put_weight(model, site, share)
    if edit is not None:
        yield Candidate(f"Weights each micro-batch by its share of the {amount.noun}.", (edit,))


def _sum_in_inner_loop(model: LoopModel, site: Site, total: str) -> Iterator[Candidate]:
    """Yields sums divided by the total of the batch: the mean of a micro-batch without any target is 0/0."""
    code, loop = site.code, model.micro_loop(site)
    nodes = list(ast.walk(loop)) if loop is not None else []
    losses = [node for node in nodes if isinstance(node, ast.Call) and callee_name(node) in _LOSSES and _is_mean(node)]
    divisions = [division for node in nodes if (division := division_by_steps(model, code, node)) is not None]
    if len(losses) == 1 and len(divisions) == 1:
        edits = (_set_sum_reduction(code, losses[0]), code.replace(divisions[0].divisor, total))
        yield Candidate("Sums the losses and divides by the targets of all micro-batches.", edits)


def _write_total(code: Code, loop: ast.For, amount: _Amount) -> str:
    """The amount over all micro-batches of an inner loop, as an expression; "" where it cannot be told."""
    wholes = _find_cut_tensors(code, loop)
    if amount.tensor in wholes:
        return amount.of(wholes[amount.tensor])
    iterated = loop.iter
    if callee_name(iterated) == "enumerate" and isinstance(iterated, ast.Call) and iterated.args:
        iterated = iterated.args[0]
    target = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) and iterated is not loop.iter else loop.target
    # An iterator would be used up by counting, and only a loop inside another one runs once per update.
    if not isinstance(iterated, ast.Name | ast.Attribute) or len(code.loops_around(loop)) == 0:
        return ""
    # A list of micro-batches: the same count of each of them.
    names = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
    first = amount.tensor.partition("[")[0].partition(".")[0]
    if first not in names:
        return ""
    text = f"sum({amount.of(amount.tensor)} for {code.text_of(target)} in {code.text_of(iterated)})"
    return text


def _find_cut_tensors(code: Code, loop: ast.For) -> dict[str, str]:
    """The whole tensor that each part in a loop is cut from: by `split`, `chunk`, or a slice in the loop's body."""
    wholes: dict[str, str] = {}
    iterated, target = loop.iter, loop.target
    if callee_name(iterated) == "enumerate" and isinstance(iterated, ast.Call) and isinstance(target, ast.Tuple):
        iterated, target = iterated.args[0], target.elts[-1]
    cuts = iterated.args if isinstance(iterated, ast.Call) and callee_name(iterated) == "zip" else [iterated]
    parts = target.elts if isinstance(target, ast.Tuple) and len(cuts) > 1 else [target]
    for part, cut in zip(parts, cuts, strict=False):
        # `for part in x.split(4):` cuts each part from `x`.
        if isinstance(part, ast.Name) and callee_name(cut) in ("split", "chunk", "tensor_split"):
            source = _find_cut_tensor(cut)
            if source is not None:
                wholes[part.id] = code.text_of(source)
    for node in loop.body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        names = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else [node.targets[0]]
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for name, value in zip(names, values, strict=False):
            # `part = x[at : at + 4]` inside the loop.
            is_slice = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice | ast.Name)
            if isinstance(name, ast.Name) and is_slice and isinstance(value, ast.Subscript):
                wholes[name.id] = code.text_of(value.value)
    return wholes


def _find_cut_tensor(cut: ast.expr) -> ast.expr | None:
    """The tensor of `x.split(4)` or `torch.split(x, 4)`."""
    if not isinstance(cut, ast.Call) or not isinstance(cut.func, ast.Attribute):
        return None
    is_function = isinstance(cut.func.value, ast.Name) and cut.func.value.id == "torch"
    return (cut.args[0] if cut.args else None) if is_function else cut.func.value


def _put_weight(model: LoopModel, site: Site, factor: str) -> Edit | None:
    """Returns the edit that puts a factor in the place of the division by K, or beside the loss; None without one."""
    # The share takes the place of 1/K. Without such a division the loss is a sum of means.
    code, scope = site.code, model.micro_loop(site) or site.code.scope_of(site.call)
    for node in ast.walk(scope):
        division = division_by_steps(model, code, node)
        if division is not None:
            return replace_by_factor(division, factor)
    loss = find_loss(site.call)
    return multiply_loss(code, loss, factor) if loss is not None else None


def multiply_loss(code: Code, loss: ast.expr, factor: str) -> Edit:
    """Returns the edit that multiplies what is differentiated."""
    return divide(code, loss, factor, "*")


# A loop over a loader: the gradients are divided at the step, when the total is known.


def _divide_at_step(model: LoopModel, finding: Finding, site: Site, amount: _Amount) -> Iterator[Candidate]:
    """Yields losses times what they count by, whose gradient is divided by the window's total before it is used."""
    code, step, loop = site.code, model.step_site, model.micro_loop(site)
    loss = find_loss(site.call)
    if step is None or step.code is not code or loop is None or loss is None:
        return
    # The total is counted between two statements of one function; two optimizers would need two totals.
    if code.scope_of(step.call) is not code.scope_of(site.call) or len(model.find_sites(Step)) > 1:
        return
    optimizer = _write_optimizer(step)
    first = find_first_of_update(model, step)
    if not optimizer or first is None or not code.owns_lines(site.statement):
        return
    total = _choose_unused_name(code, loop, f"window_{amount.noun}")
    count = amount.of(amount.tensor)
    removed: list[Edit] = []
    # A division by K is superfluous: the gradient is divided by the total.
    for node in ast.walk(loop):
        division = division_by_steps(model, code, node)
        if division is not None and not removed:
            removed = remove_division(division)
    # Two edits of one place cannot be applied.
    if any(edit.span[0] <= code.span(loss)[0] and code.span(loss)[1] <= edit.span[1] for edit in removed):
        division_node = loss  # `(loss / K).backward()`: one edit does both
        assert isinstance(division_node, ast.BinOp)
        removed = []
        weighted = code.replace(division_node, f"{code.operand(division_node.left, product=True)} * {count}")
    else:
        weighted = multiply_loss(code, loss, count)
    inner, outer = code.indent_of(site.statement), code.indent_of(loop)
    # Dividing comes before clipping, which compares the gradient's norm with a limit.
    at_step = code.indent_of(first)
    unit = inner[len(outer) :] or "    "
    end = code.line_end
    lines = [
        f"{at_step}for group in {optimizer}.param_groups:",
        f'{at_step}{unit}for parameter in group["params"]:',
        f"{at_step}{unit * 2}if parameter.grad is not None:",
        f"{at_step}{unit * 3}parameter.grad /= {total}",
        f"{at_step}{total} = 0",
    ]
    edits = [
        code.insert_before(loop, f"{outer}{total} = 0{end}"),
        *removed,
        weighted,
        code.insert_after(site.statement, f"{inner}{total} += {count}{end}"),
        code.insert_before(first, "".join(line + end for line in lines)),
    ]
    yield Candidate(f"Divides the gradient by the number of {amount.noun} in the window.", join_edits(edits))


def _write_optimizer(step: Site) -> str:
    """The text of the optimizer that steps; "" where it is not told."""
    func = step.call.func
    if not isinstance(func, ast.Attribute):
        return ""
    receiver = step.code.text_of(func.value)
    return step.code.text_of(step.call.args[0]) if step.call.args and "scaler" in receiver.lower() else receiver


def _choose_unused_name(code: Code, loop: Loop, name: str) -> str:
    names = {node.id for node in ast.walk(code.scope_of(loop)) if isinstance(node, ast.Name)}
    while name in names:
        name += "_"
    return name


# The loss of a Trainer: it is given the number of targets in all micro-batches.


def _use_items_of_trainer(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields a sum over the targets divided by `num_items_in_batch`, where a Trainer hands that on."""
    for code in model.codes.values():
        for function in ast.walk(code.tree):
            if not isinstance(function, Function) or function.name not in ("compute_loss", "forward"):
                continue
            items = _write_items(function)
            for node in ast.walk(function) if items else ():
                if isinstance(node, ast.Call) and callee_name(node) in _POINTWISE and _is_mean(node):
                    yield Candidate(
                        "Divides the sum of the losses by `num_items_in_batch`.", _divide_sum(code, node, items)
                    )


def _write_items(function: Function) -> str:
    """How a function reads the number of targets in the window; "" where it is not given it."""
    arguments = function.args
    if any(each.arg == "num_items_in_batch" for each in [*arguments.args, *arguments.kwonlyargs]):
        return "num_items_in_batch"
    return f'{arguments.kwarg.arg}["num_items_in_batch"]' if arguments.kwarg is not None else ""


def _is_mean(call: ast.Call) -> bool:
    reductions = [each.value for each in call.keywords if each.arg == "reduction"]
    return all(isinstance(each, ast.Constant) and each.value == "mean" for each in reductions)


def _divide_sum(code: Code, call: ast.Call, items: str) -> tuple[Edit, ...]:
    """Returns the edits from the mean of a loss to its sum over a number."""
    end = code.span(call)[1]
    return _set_sum_reduction(code, call), code.replace_between(end, end, f" / {items}")


def _set_sum_reduction(code: Code, call: ast.Call) -> Edit:
    """Returns the edit that makes a loss the sum over its targets."""
    reduction = next((each.value for each in call.keywords if each.arg == "reduction"), None)
    if reduction is not None:
        return code.replace(reduction, '"sum"')
    arguments = [*call.args, *(each.value for each in call.keywords)]
    end = max(code.span(each)[1] for each in arguments)
    return code.replace_between(end, end, ', reduction="sum"')
