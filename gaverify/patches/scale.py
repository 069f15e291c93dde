"""Repairs of the factor on the losses: a division by K that is missing, made twice, or by another number.

The audit fitted the factor: the accumulated gradient is K times too large where nobody divides, and K times too small
where two divide, such as the script and a framework.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass

from gaverify.patches.candidates import Candidate, StepsText, divide, drop_factor, join_edits, write_steps
from gaverify.patches.code import Code, Function, callee_name
from gaverify.patches.loop import LoopModel
from gaverify.records.events import Backward
from gaverify.records.findings import Finding
from gaverify.records.patch import Edit
from gaverify.thresholds import THREE_DIGITS


def repair_factor(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields repairs of a gradient that is a constant times the full batch's (GAV201)."""
    factor = next((float(each.values["factor"]) for each in finding.evidence if "factor" in each.values), math.nan)
    if not factor > 0 or model.steps < 2:
        return
    # The factor chooses the repair. Its tolerance tells K from K + 1 up to K = 199.
    if math.isclose(factor, 1 / model.steps, rel_tol=THREE_DIGITS):
        yield from _remove_divisions(model, finding)
    if math.isclose(factor, model.steps, rel_tol=THREE_DIGITS):
        yield from _divide_terms(model)
        yield from _add_division(model, finding)
    if math.isclose(factor, model.steps**2, rel_tol=THREE_DIGITS):
        yield from _divide_for_product(model)
    yield from _correct_divisions(model, finding)


def _add_division(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields the loss divided where it is differentiated, else where it is returned to a framework."""
    losses = list(_find_losses(model, finding))
    # Several losses with one missing division have it missing alike.
    if len(losses) > 1 and all(code is losses[0][0] for code, _ in losses):
        for steps in write_steps(model, *losses[0], most=1):
            edits = tuple(divide(code, node, steps.text) for code, node in losses)
            yield Candidate(f"Divides every loss by `{steps.text}`.", edits)
    for code, node in losses:
        for steps in write_steps(model, code, node):
            edits = join_edits([divide(code, node, steps.text)], steps.note(code, code.statement_of(node)))
            yield Candidate(f"Divides the loss by `{steps.text}`.", edits)


def _divide_terms(model: LoopModel) -> Iterator[Candidate]:
    """Yields sums of which one term is divided by K, with another term divided as well."""
    # `loss_a / K + loss_b`: the first term is right.
    for site in model.find_sites(Backward):
        code = site.code
        for node in ast.walk(code.scope_of(site.call)):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
                continue
            # Either side may be the one that is divided.
            pairs = ((node.left, node.right), (node.right, node.left))
            for divided, undivided in pairs:
                division = division_by_steps(model, code, divided)
                if division is not None and division_by_steps(model, code, undivided) is None:
                    edit = code.replace(undivided, f"{code.operand(undivided, product=True)} / {division.text}")
                    yield Candidate(f"Divides every term of the loss by `{division.text}`.", (edit,))


def _divide_for_product(model: LoopModel) -> Iterator[Candidate]:
    """Yields a loss that is divided by K where it is multiplied by it."""
    for site in model.find_sites(Backward):
        code = site.code
        for node in ast.walk(code.scope_of(site.call)):
            if not (isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Mult)):
                continue
            factor = node.right if isinstance(node, ast.BinOp) else node.value
            product = Division(code, node, factor)
            if _is_steps(model, product):
                multiplicand = node.left if isinstance(node, ast.BinOp) else node.target
                first, last = code.span(multiplicand)[1], code.span(factor)[0]
                # Between both may stand parentheses and line breaks beside the operator.
                edit = code.replace_between(first, last, code.text_between(first, last).replace("*", "/", 1))
                yield Candidate(f"Divides the loss by `{product.text}`, by which it is multiplied.", (edit,))


def _find_losses(model: LoopModel, finding: Finding) -> Iterator[tuple[Code, ast.expr]]:
    """Yields the expressions that are differentiated, or that a framework differentiates."""
    for site in model.find_sites(Backward):
        loss = find_loss(site.call)
        if loss is not None:
            yield site.code, loss
    place = model.place_of_finding(finding)
    # A framework calls `backward` itself, in its own files; the finding then names the user's method.
    if place is None or model.find_sites(Backward):
        return
    code, line = place
    function = next((node for node in _functions_at(code, line) if node.name in _LOSS_METHODS), None)
    if function is None:
        return
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield code, _find_returned_loss(node.value)


_LOSS_METHODS = ("compute_loss", "training_step", "forward")


def _find_returned_loss(value: ast.expr) -> ast.expr:
    """The loss in what a method returns: `(loss, outputs) if return_outputs else loss`, `{"loss": loss}`."""
    if isinstance(value, ast.IfExp):
        return value.orelse
    if isinstance(value, ast.Tuple) and value.elts:
        return value.elts[0]
    if isinstance(value, ast.Dict):
        named = zip(value.keys, value.values, strict=True)
        return next((each for key, each in named if isinstance(key, ast.Constant) and key.value == "loss"), value)
    return value


def _functions_at(code: Code, line: int) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in code.nodes_at(line) if isinstance(node, Function)]


def find_loss(call: ast.Call) -> ast.expr | None:
    """The loss in `loss.backward()`, `scaler.scale(loss).backward()` or `accelerator.backward(loss)`."""
    # With arguments the loss may be the receiver or the first argument.
    if call.args and callee_name(call) in ("backward", "manual_backward"):
        named = call.func.value if isinstance(call.func, ast.Attribute) else None
        # `loss.backward(gradient)` differentiates its receiver; `accelerator.backward(loss)` its argument.
        first = call.args[0]
        if isinstance(first, ast.Starred):
            return None
        is_gradient = isinstance(named, ast.Name) and "loss" in named.id.lower()
        return named if is_gradient else first
    if not isinstance(call.func, ast.Attribute):
        return None
    receiver = call.func.value
    # A scaler's product is no loss: the division goes inside its parentheses.
    if callee_name(receiver) == "scale" and isinstance(receiver, ast.Call) and receiver.args:
        return receiver.args[0]
    return receiver


@dataclass(frozen=True)
class Division:
    """A division, or a product with a reciprocal, or the statement `loss /= K`."""

    code: Code
    node: ast.BinOp | ast.AugAssign | ast.Call
    divisor: ast.expr

    @property
    def text(self) -> str:
        """The divisor's text."""
        return self.code.text_of(self.divisor)


def find_divisions(model: LoopModel, finding: Finding) -> list[Division]:
    """The divisions in the functions that differentiate, step with or make the loss, in this order."""
    by_node: dict[ast.AST, Division] = {}
    for code, scope in _scopes_of_loss(model, finding):
        for node in ast.walk(scope):
            if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
                divisor = node.right if isinstance(node, ast.BinOp) else node.value
                by_node.setdefault(node, Division(code, node, divisor))
            elif callee_name(node) in ("div", "div_", "true_divide") and isinstance(node, ast.Call) and node.args:
                by_node.setdefault(node, Division(code, node, node.args[-1]))
    return list(by_node.values())


def _scopes_of_loss(model: LoopModel, finding: Finding) -> Iterator[tuple[Code, ast.AST]]:
    """Yields the functions in which a loss may be divided, the likeliest first."""
    for site in [*model.find_sites(Backward), *([model.step_site] if model.step_site is not None else [])]:
        yield site.code, site.code.scope_of(site.call)
    place = model.place_of_finding(finding)
    if place is not None:
        yield from ((place[0], function) for function in _functions_at(*place)[:1])
    # Every function that returns something may make the loss, so these come last.
    for code in model.codes.values():  # losses that are made in functions of their own
        for node in ast.walk(code.tree):
            if isinstance(node, Function) and any(isinstance(each, ast.Return) for each in ast.walk(node)):
                yield code, node


def division_by_steps(model: LoopModel, code: Code, node: ast.AST) -> Division | None:
    """A node as a division by K; None where it is none."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
        division = Division(code, node, node.right if isinstance(node, ast.BinOp) else node.value)
        return division if _is_steps(model, division) else None
    return None


def replace_by_factor(division: Division, factor: str) -> Edit:
    """Returns the edit that puts a factor in the place of a division."""
    code, node = division.code, division.node
    if isinstance(node, ast.BinOp):
        return code.replace(node, f"{code.operand(node.left, product=True)} * {factor}")
    assert isinstance(node, ast.AugAssign)
    return code.replace(node, f"{code.text_of(node.target)} *= {factor}")


def _is_steps(model: LoopModel, division: Division) -> bool:
    """Whether a divisor is written as K is."""
    code, text = division.code, division.text
    number = str(model.steps)
    # By value, by a name that is known for K, or by a name that says so.
    return (
        text in (number, f"{number}.0")
        or text in model.find_steps_texts(code, division.node)
        or "accum" in text.lower()
    )


def _remove_divisions(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields the source without one of its divisions by K."""
    every = find_divisions(model, finding)
    by_steps = [division for division in every if _is_steps(model, division)]
    # A name that is none of K's own may hold K all the same: the trial tells.
    for division in by_steps or [each for each in every if isinstance(each.divisor, ast.Name | ast.Attribute)]:
        edits = remove_division(division)
        if edits:
            yield Candidate(f"Removes a second division by `{division.text}`.", tuple(edits))


def remove_division(division: Division) -> list[Edit]:
    """Returns the edits that remove a division; none where its shape is unknown."""
    code, node = division.code, division.node
    if isinstance(node, ast.BinOp):
        if isinstance(node.left, ast.Constant):  # `1 / K`, a factor: the product with it goes
            parent = code.parents[node]
            if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mult):
                return [drop_factor(code, parent, parent.left if parent.right is node else parent.right)]
            return []
        statement = code.statement_of(node)
        target = code.text_of(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
        if target == code.text_of(node.left) and code.parents[node] is statement:  # `loss = loss / K`
            return code.delete(statement)
        return [_drop_division(code, node)]
    statement = code.statement_of(node)
    if isinstance(node, ast.AugAssign) or (isinstance(statement, ast.Expr) and statement.value is node):
        return _delete_with_loops(code, statement)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return [code.replace(node, code.text_of(node.func.value))]
    return []


def _drop_division(code: Code, node: ast.BinOp) -> Edit:
    """Returns the edit from `(loss / K)` to `loss`, without the parentheses that nothing needs any more."""
    operand = code.operand(node.left, product=True)
    parent = code.parents[node]
    first, last = code.span(node)
    # Parentheses may go where what stands in them needs none in front of a dot.
    is_receiver = isinstance(parent, ast.Attribute) and isinstance(node.left, ast.Name | ast.Call | ast.Subscript)
    is_receiver = is_receiver or (isinstance(parent, ast.Attribute) and isinstance(node.left, ast.Attribute))
    line = code.lines[first[0] - 1]
    after = code.lines[last[0] - 1]
    if is_receiver and line[first[1] - 1 : first[1]] == "(" and after[last[1] : last[1] + 1] == ")":
        return code.replace_between((first[0], first[1] - 1), (last[0], last[1] + 1), operand)
    return code.replace(node, operand)


def _delete_with_loops(code: Code, statement: ast.stmt) -> list[Edit]:
    """Returns the edits that remove a statement, and the loops and tests that would be empty without it."""
    # `for p in params: p.grad /= K` leaves nothing of the loop.
    while len(code.block_of(statement)) == 1:
        parent = code.parents[statement]
        if not isinstance(parent, ast.For | ast.If | ast.With) or getattr(parent, "orelse", []):
            return []
        statement = parent
    return code.delete(statement)


def _correct_divisions(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields the source with K in the place of another divisor of the loss."""
    # Only beside a backward pass: elsewhere a division by another number is part of the model.
    passes = {site.code.scope_of(site.call) for site in model.find_sites(Backward)}
    for division in find_divisions(model, finding):
        code, node = division.code, division.node
        if _is_steps(model, division) or code.scope_of(node) not in passes:
            continue
        # A divisor that is made of K, such as `K ** 2`, names it.
        parts = [StepsText(code.text_of(part)) for part in _names_in(division.divisor)]
        for steps in [*parts, *write_steps(model, code, node, most=1)]:
            edits = join_edits([code.replace(division.divisor, steps.text)], steps.note(code, code.statement_of(node)))
            yield Candidate(f"Divides the loss by `{steps.text}` instead of `{division.text}`.", edits)


def _names_in(divisor: ast.expr) -> list[ast.expr]:
    """The variables in an expression that is more than one."""
    if isinstance(divisor, ast.Name | ast.Attribute | ast.Subscript):
        return []
    parts = [node for node in ast.walk(divisor) if isinstance(node, ast.Name | ast.Attribute | ast.Subscript)]
    # `args` is a part of the name `args.accum`, and no divisor of its own.
    within = {inner for part in parts for inner in ast.walk(part) if inner is not part}
    return [part for part in parts if part not in within]
