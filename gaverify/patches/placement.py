"""Repairs of calls at the wrong place of a loop: step, zero_grad, clipping, schedules, and the end of a window.

Statements are moved as whole lines, with their comments, to a place that is right by the rules of accumulation:
clear, then K backward passes, then unscale, clip, step, and step the schedule.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gaverify.patches.candidates import Candidate, join_edits, write_steps
from gaverify.patches.code import Code, Loop, callee_name
from gaverify.patches.loop import Index, LoopModel, Site, remainder_of
from gaverify.records.events import Backward, Clipping, ScalerCall, SchedulerStep, Step, ZeroGrad
from gaverify.records.findings import Finding
from gaverify.records.patch import Edit

# Where a window ends.


def repair_boundary(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields the source with another test of whether a window ends (GAV601 to GAV604)."""
    for code, _, test in _find_boundary_tests(model):
        # The loop's own counter tells how many rounds are over; a test that counts otherwise is read as it stands.
        index = model.index_around(code, test)
        remainder = remainder_of(test)
        if remainder is None:
            continue
        for rounds in _write_round_counts(code, remainder, index):
            for modulus in _write_moduli(model, code, test, remainder):
                text = _write_boundary(code, test, rounds, modulus)
                if text == code.text_of(test):
                    continue
                yield Candidate(f"Ends the accumulation window where `{text}`.", (code.replace(test, text),))
                parent = code.parents[test]
                # `i % K == 0 and i > 0`: the second part was there to leave out the first round.
                if isinstance(parent, ast.BoolOp):
                    yield Candidate(f"Ends the accumulation window where `{text}`.", (code.replace(parent, text),))
    yield from _correct_counts(model)


def _correct_counts(model: LoopModel) -> Iterator[Candidate]:
    """Yields tests of a count that is one off: `count > K` for `count == K`."""
    # The count is reset at the step, so `== K` is right whatever the fault was.
    for site in _find_update_sites(model):
        for guard in model.find_guards(site):
            compared = model.count_test(site.code, guard.test)
            if compared is not None:
                test, steps = compared
                text = f"{site.code.text_of(test.left)} == {steps}"
                yield Candidate(f"Ends the accumulation window where `{text}`.", (site.code.replace(test, text),))


def _find_boundary_tests(model: LoopModel) -> Iterator[tuple[Code, Loop | None, ast.expr]]:
    """Yields the tests with remainders around steps and clearings, then those of the same functions."""
    yielded: set[ast.expr] = set()
    for site in _find_update_sites(model):
        code = site.code
        loop = model.micro_loop(site)
        guarding = [test for guard in model.find_guards(site) for test in model.find_boundaries(code, guard.test)]
        for test in [*guarding, *model.find_boundaries(code, loop or code.scope_of(site.call))]:
            if test not in yielded:
                yielded.add(test)
                yield code, next(iter(code.loops_around(test)), None), test


def _find_update_sites(model: LoopModel) -> list[Site]:
    """The calls whose loops and tests decide where a window ends, also those of functions that hold them."""
    sites = [site for kind in (Step, ZeroGrad, Backward) for site in model.find_sites(kind)]
    return [each for site in sites for each in (site, *model.find_callers(site))]


def _write_round_counts(code: Code, remainder: ast.BinOp, index: Index | None) -> list[str]:
    """Texts of the number of rounds that are over at the end of one, the likelier first."""
    counter = remainder.left
    text = code.text_of(counter)
    # A test may count in a variable of its own, whatever the loop counts.
    if index is not None and any(isinstance(node, ast.Name) and node.id == index.name for node in ast.walk(counter)):
        return [index.rounds_done]
    # `(i + 1) % K` may be right for an index from 0, or one too many for an index from 1.
    if isinstance(counter, ast.BinOp) and isinstance(counter.op, ast.Add) and isinstance(counter.right, ast.Constant):
        return [text, code.text_of(counter.left)]
    return [text, f"{text} + 1"]


def _write_moduli(model: LoopModel, code: Code, test: ast.expr, remainder: ast.BinOp) -> list[str]:
    """Texts of K for a test: its own, then other names for K."""
    written = code.text_of(remainder.right)
    further = [steps.text for steps in write_steps(model, code, test, most=3) if steps.text != written]
    return [written, *further[:2]]


def _write_boundary(code: Code, test: ast.expr, left: str, modulus: str) -> str:
    """The test that a number of rounds is a multiple of K, or that it is none where the old test asks for that."""
    is_sum = any(sign in left for sign in "+-*/ ")
    count = f"({left})" if is_sum and not left.startswith("(") else left
    modulus = f"({modulus})" if " " in modulus and not modulus.startswith("(") else modulus
    if isinstance(test, ast.BinOp):
        return f"{count} % {modulus}"
    if isinstance(test, ast.UnaryOp):
        return f"not {count} % {modulus}"
    assert isinstance(test, ast.Compare)
    # The opposite test guards a `continue`.
    sign = "!=" if isinstance(test.ops[0], ast.NotEq | ast.Gt) else "=="
    return f"{count} % {modulus} {sign} 0"


# The short last window.


def repair_tail(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields a step at the end of the loop, with the loss divided by the window's own number (GAV602, 604, 605)."""
    for code, loop, test in _find_boundary_tests(model):
        index = model.index_of(code, loop) if loop is not None else None
        remainder = remainder_of(test)
        # Without the number of rounds nobody can tell which one is the last.
        if loop is None or index is None or not index.length or remainder is None:
            continue
        divisions = _divide_by_window_size(model, code, loop, index, remainder)
        last = f"{index.rounds_done} == {index.length}"
        # A test that is true inside the window ("go on") gets the opposite ending.
        is_open = isinstance(test, ast.BinOp) or (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq))
        ending = f" and {last.replace('==', '!=')}" if is_open else f" or {last}"
        if finding.code == "GAV605":
            if divisions:
                yield Candidate("Divides the loss by the number of micro-batches in its window.", divisions)
            continue
        # The test knows the last round already.
        if index.length in code.text_of(_find_outermost_test(code, test)):
            continue
        parent = code.parents[test]
        # `or` binds less than everything around it.
        needs = isinstance(parent, ast.BoolOp | ast.UnaryOp | ast.Compare)
        text = code.text_of(test) + ending
        edit = code.replace(test, f"({text})" if needs else text)
        if divisions:
            title = "Steps after the last micro-batch as well, and divides each loss by the size of its window."
            yield Candidate(title, (edit, *divisions))
        yield Candidate("Steps after the last micro-batch as well.", (edit,))


def _find_outermost_test(code: Code, test: ast.expr) -> ast.expr:
    """The outermost expression that a test is part of."""
    outermost = test
    for each in code.nodes_around(test):
        if not isinstance(each, ast.expr):
            break
        outermost = each
    return outermost


def _divide_by_window_size(
    model: LoopModel, code: Code, loop: Loop, index: Index, remainder: ast.BinOp
) -> tuple[Edit, ...]:
    """Returns the edits of losses that are divided by K into divided by the size of their window; none without any."""
    steps = code.text_of(remainder.right)
    divisors: list[ast.expr] = []
    for node in ast.walk(loop):
        divisor: ast.expr | None = None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            divisor = node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            divisor = node.value
        if divisor is not None and code.text_of(divisor) in (steps, str(model.steps)):
            divisors.append(divisor)
    before = index.rounds_before
    # The last window has fewer than K micro-batches where K does not divide the number of rounds.
    size = f"min({steps}, {index.length} - {before} // {steps} * {steps})"
    return tuple(code.replace(divisor, size) for divisor in divisors[:1])


# Calls that stand in every micro-batch, or on the wrong side of the step.


@dataclass(frozen=True)
class _Destination:
    """Where moved statements go: before or behind a statement, with its indent."""

    code: Code
    statement: ast.stmt
    is_before: bool = False
    indent: str = ""

    def put(self, statements: Sequence[ast.stmt], source: Code) -> Edit:
        """Returns the edit that puts statements there."""
        text = "".join(source.lines_of(each, self.indent) for each in statements)
        return self.put_text(text)

    def put_text(self, text: str) -> Edit:
        """Returns the edit that puts whole lines there."""
        insert = self.code.insert_before if self.is_before else self.code.insert_after
        return insert(self.statement, text)


def place_behind_step(model: LoopModel, site: Site) -> _Destination:
    """The place behind a step, and behind the update of its scaler."""
    code, statement = site.code, site.statement
    block = code.block_of(statement)
    at = next(at for at, each in enumerate(block) if each is statement)
    # `scaler.step(optimizer)` and `scaler.update()` belong together.
    if at + 1 < len(block) and _makes_call(block[at + 1], "update"):
        statement = block[at + 1]
    return _Destination(code, statement, indent=code.indent_of(statement))


def place_before_step(model: LoopModel, site: Site) -> _Destination:
    """The place before a step."""
    return _Destination(site.code, site.statement, is_before=True, indent=site.code.indent_of(site.statement))


def _makes_call(statement: ast.stmt, *names: str) -> bool:
    """Whether a statement calls one of these names, and nothing else."""
    return any(callee_name(node) in names for node in ast.walk(statement) if isinstance(node, ast.Call))


def find_movable_statement(model: LoopModel, site: Site) -> ast.stmt | None:
    """The statement of a call, with the tests that would be empty without it; None where it cannot be moved."""
    code, statement = site.code, site.statement
    # Moving the only statement of a block leaves a syntax error: the `if` goes with it, unless it is the boundary.
    while len(code.block_of(statement)) == 1:
        parent = code.parents[statement]
        if not isinstance(parent, ast.If) or parent.orelse or model.find_boundaries(code, parent.test):
            break
        statement = parent
    is_simple = isinstance(statement, ast.Expr | ast.Assign | ast.If)
    return statement if is_simple and code.delete(statement) else None


def _move_call(model: LoopModel, site: Site, destination: _Destination, title: str) -> Iterator[Candidate]:
    statement = find_movable_statement(model, site)
    if statement is None or statement is destination.statement or site.code is not destination.code:
        return
    edits = join_edits(site.code.delete(statement), [destination.put([statement], site.code)])
    yield Candidate(title, edits)


def _move_all_calls(
    model: LoopModel, sites: Sequence[Site], destination: _Destination, title: str
) -> Iterator[Candidate]:
    """Yields several calls moved at once that are made in every micro-batch: one by one they repair nothing."""
    misplaced = [site for site in sites if not model.is_once_per_window(site) and site.code is destination.code]
    statements = [statement for site in misplaced if (statement := find_movable_statement(model, site)) is not None]
    if len(statements) > 1 and len(statements) == len(misplaced) and destination.statement not in statements:
        deleted = [edit for statement in statements for edit in destination.code.delete(statement)]
        yield Candidate(title, (*deleted, destination.put(statements, destination.code)))


def repair_clearing(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields gradients that are cleared once per update, behind the step (GAV602, GAV603, GAV601)."""
    step, clearings = model.step_site, model.find_sites(ZeroGrad)
    if step is None:
        return
    is_step_in_place = model.is_once_per_window(step)
    if is_step_in_place:
        yield from _move_all_calls(
            model, clearings, place_behind_step(model, step), "Clears the gradients behind the step."
        )
    for clearing in clearings:
        # Two clearings, one of them right: the other one is superfluous.
        if len(clearings) > 1:
            well_placed = [each for each in clearings if each is not clearing and model.is_once_per_window(each)]
            statement = find_movable_statement(model, clearing)
            if well_placed and statement is not None and not model.is_once_per_window(clearing):
                yield Candidate("Removes a `zero_grad` inside the window.", tuple(clearing.code.delete(statement)))
        if is_step_in_place and not model.is_once_per_window(clearing):
            yield from _move_call(
                model, clearing, place_behind_step(model, step), "Clears the gradients behind the step."
            )
            yield from _move_before_inner_loop(model, clearing, "Clears the gradients before the first micro-batch.")
    for clearing in clearings if is_step_in_place else ():
        yield from _move_call(model, clearing, place_behind_step(model, step), "Clears the gradients behind the step.")
    # There may be no clearing at all, so that gradients of all updates add up (GAV602).
    text = _write_clearing(step)
    if text and finding.code == "GAV602" and not step.code.owns_lines(step.statement):
        end = step.code.span(step.statement)[1]  # `if …: optimizer.step()`
        edit = step.code.replace_between(end, end, f"; {text}")
        yield Candidate("Clears the gradients behind the step.", (edit,))
    elif text and finding.code == "GAV602":
        destination = place_behind_step(model, step)
        line = f"{destination.indent}{text}{step.code.line_end}"
        yield Candidate("Clears the gradients behind the step.", (destination.put_text(line),))


def _write_clearing(step: Site) -> str:
    """The call of `zero_grad` that belongs to a step; "" where the optimizer is not known."""
    call = step.call
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    if receiver is None:
        return ""
    # `scaler.step(optimizer)`: the argument is the optimizer.
    is_scaler = bool(call.args) and "scaler" in step.code.text_of(receiver).lower()
    return f"{step.code.text_of(call.args[0] if is_scaler else receiver)}.zero_grad()"


def _move_before_inner_loop(model: LoopModel, site: Site, title: str) -> Iterator[Candidate]:
    """Yields a statement moved before the loop over micro-batches, where another loop is around that."""
    loops = site.code.loops_around(site.call)
    if len(loops) > 1:
        destination = _Destination(site.code, loops[0], is_before=True, indent=site.code.indent_of(loops[0]))
        yield from _move_call(model, site, destination, title)


def repair_clipping(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields a clipping moved before the step (GAV606, GAV608)."""
    step = model.step_site
    if step is None:
        return
    clippings = model.find_sites(Clipping)
    unscaling = [site for site in model.find_sites(ScalerCall) if callee_name(site.call) == "unscale_"]
    for clipping in clippings:
        # Clipping needs unscaled gradients, so an unscaling in every micro-batch moves along.
        early = [site for site in unscaling if not model.is_once_per_window(site)]
        statements = [find_movable_statement(model, site) for site in [*early, clipping]]
        present = [each for each in statements if each is not None]
        if len(present) != len(statements) or step.statement in present:
            continue
        edits = [edit for each in present for edit in clipping.code.delete(each)]
        destination = place_before_step(model, step)
        text = _write_unscaling(step)
        # With a scaler and without any unscaling the limit is compared with scaled gradients.
        if destination.code is clipping.code and text and not unscaling and "unscale_" not in clipping.code.text:
            line = f"{destination.indent}{text}{step.code.line_end}"
            moved = [destination.put_text(line), destination.put(present, clipping.code)]
            yield Candidate("Unscales and clips the gradients once per update.", join_edits(edits, moved))
        if destination.code is clipping.code:
            edits.append(destination.put(present, clipping.code))
            yield Candidate("Clips once per update, before the step.", tuple(edits))


def _write_unscaling(step: Site) -> str:
    """The call that unscales the gradients of a step through a scaler; "" for other steps."""
    func, arguments = step.call.func, step.call.args
    is_scaled = isinstance(func, ast.Attribute) and bool(arguments) and "scaler" in step.code.text_of(func).lower()
    if not is_scaled or not isinstance(func, ast.Attribute):
        return ""
    return f"{step.code.text_of(func.value)}.unscale_({step.code.text_of(arguments[0])})"


def repair_schedule(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields a schedule that steps behind the optimizer's step (GAV607)."""
    step = model.step_site
    if step is not None:
        title = "Steps the schedule once per update, behind the optimizer's step."
        yield from _move_all_calls(model, model.find_sites(SchedulerStep), place_behind_step(model, step), title)
        for site in model.find_sites(SchedulerStep):
            yield from _move_call(model, site, place_behind_step(model, step), title)


def repair_scaler(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields a scaler that unscales and updates once per update, around the clipping and the step (GAV608)."""
    step = model.step_site
    if step is None:
        return
    edits: list[Edit] = []
    for site in model.find_sites(ScalerCall):
        statement = find_movable_statement(model, site)
        if model.is_once_per_window(site) or statement is None or site.code is not step.code:
            continue
        destination = place_behind_step(model, step)
        # Unscaling comes first: what follows in the update clips or reads the gradients.
        if callee_name(site.call) == "unscale_":
            first = find_first_of_update(model, step) or step.statement
            destination = _Destination(step.code, first, is_before=True, indent=step.code.indent_of(first))
        edits += [*site.code.delete(statement), destination.put([statement], site.code)]
    if edits:
        yield Candidate("Unscales the gradients and updates the scaler once per update.", tuple(edits))


def repair_counter(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields a counter of micro-batches that counts updates, where a setting of the step is made from it (GAV609)."""
    step = model.step_site
    loop = model.micro_loop(step) if step is not None else None
    if step is None or loop is None or not model.is_once_per_window(step):
        return
    code = step.code
    of_update = code.block_of(step.statement)
    destination = _Destination(code, of_update[-1], indent=code.indent_of(step.statement))
    for node in ast.walk(loop):
        # `global_step += 1` behind every micro-batch; a count of samples adds no constant.
        is_count = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
        if is_count and isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant):
            removed = code.delete(node) if code.block_of(node) is not of_update else []
            if removed:
                title = f"Counts updates instead of micro-batches in `{code.text_of(node.target)}`."
                yield Candidate(title, join_edits(removed, [destination.put([node], code)]))


_OF_UPDATE = ("step", "unscale_", "update", "zero_grad", "clip_grad_norm_", "clip_grad_value_", "clip_gradients")
"""Calls that belong to an update."""


def repair_step(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields a step that is made once per window: in the test that is there, in a new one, behind the inner loop."""
    step = model.step_site
    if step is None or model.is_once_per_window(step):
        return
    # An update in a function of its own is made where that is called.
    is_function = model.micro_loop(step) is None and model.index_around(step.code, step.call) is None
    step = next(iter(model.find_callers(step)), step) if is_function else step
    code = step.code
    group = _find_update_group(model, code, step.statement)
    if not all(code.owns_lines(each) for each in group):
        return
    yield from _step_in_existing_test(model, step, group)
    yield from _step_behind_inner_loop(model, step, group)
    yield from _step_in_new_test(model, step, group)


def _find_update_group(model: LoopModel, code: Code, statement: ast.stmt) -> list[ast.stmt]:
    """The statements beside a step that belong to the update as well."""
    # Statements in front of the step and behind it move with it, as far as nothing else stands between.
    block = code.block_of(statement)
    at = next(at for at, each in enumerate(block) if each is statement)
    first, last = at, at
    while first > 0 and _is_of_update(model, code, block[first - 1]):
        first -= 1
    while last + 1 < len(block) and _is_of_update(model, code, block[last + 1]):
        last += 1
    return block[first : last + 1]


def _is_of_update(model: LoopModel, code: Code, statement: ast.stmt) -> bool:
    # A test for the boundary holds an update of its own.
    is_simple = isinstance(statement, ast.Expr | ast.Assign | ast.If)
    is_test = isinstance(statement, ast.If) and model.is_boundary(code, statement.test)
    return is_simple and not is_test and _makes_call(statement, *_OF_UPDATE) and not _makes_call(statement, "backward")


def find_first_of_update(model: LoopModel, step: Site) -> ast.stmt | None:
    """The first statement of the update that a step belongs to, behind what unscales its gradients; None outside."""
    group = _find_update_group(model, step.code, step.statement)
    if not model.is_once_per_window(step):
        return None
    return next((each for each in group if not _makes_call(each, "unscale_")), step.statement)


def _find_early_clearings(model: LoopModel, step: Site, group: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The clearings in the loop of a step that do not stand beside it: they have to go with it."""
    loop = model.micro_loop(step)
    statements = []
    for site in model.find_sites(ZeroGrad):
        statement = find_movable_statement(model, site)
        in_loop = site.code is step.code and model.micro_loop(site) is loop
        in_loop = in_loop and site.code.scope_of(site.call) is step.code.scope_of(step.call)
        if in_loop and statement is not None and statement not in group and not model.is_once_per_window(site):
            statements.append(statement)
    return statements


def _step_in_existing_test(model: LoopModel, step: Site, group: Sequence[ast.stmt]) -> Iterator[Candidate]:
    """Yields the update in a test for the end of a window that stands in the same loop."""
    code, loop = step.code, model.micro_loop(step)
    scope, block = code.scope_of(step.call), code.block_of(step.statement)
    around = loop if loop is not None or isinstance(scope, ast.Module) else scope
    tests = [node for node in ast.walk(around) if isinstance(node, ast.If)] if around is not None else []
    for node in tests:
        # A statement that is alone in its block, or shares its line, cannot be moved.
        if not model.is_boundary(code, node.test) or not all(map(code.delete, group)):
            continue
        at = next((at for at, each in enumerate(block) if each is node), None)
        # Behind the test the update comes after everything in it, so it goes to the end of its body.
        follows = at is not None and at + 1 < len(block) and block[at + 1] is group[0]
        last = node.body[-1]
        destination = _Destination(code, last, indent=code.indent_of(last)) if follows else _place_in_test(code, node)
        edits = join_edits(*(code.delete(each) for each in group), [destination.put(group, code)])
        yield Candidate(f"Steps only where `{code.text_of(node.test)}`.", edits)


def _place_in_test(code: Code, test: ast.If) -> _Destination:
    """The place of a step among the statements of an update: behind clippings, before what follows a step."""
    indent = code.indent_of(test.body[0])
    for statement in test.body:
        if _makes_call(statement, "clip_grad_norm_", "clip_grad_value_", "clip_gradients", "unscale_"):
            continue
        return _Destination(code, statement, is_before=True, indent=indent)
    return _Destination(code, test.body[-1], indent=indent)


def _step_behind_inner_loop(model: LoopModel, step: Site, group: Sequence[ast.stmt]) -> Iterator[Candidate]:
    """Yields the update behind the loop over micro-batches, where another loop is around that."""
    code, loops = step.code, step.code.loops_around(step.call)
    # The loop would be empty.
    if len(loops) < 2 or len(code.block_of(group[0])) == len(group):
        return
    inner, outer = loops[:2]
    # Passes over a whole loader are epochs, and no windows.
    is_over_loader = isinstance(inner, ast.For) and isinstance(inner.iter, ast.Name | ast.Attribute)
    if is_over_loader and isinstance(outer, ast.For) and callee_name(outer.iter) == "range":
        return
    clearings = _find_early_clearings(model, step, group)
    indent = code.indent_of(inner)
    edits = [edit for each in [*group, *clearings] for edit in code.delete(each)]
    edits.append(_Destination(code, inner, indent=indent).put(group, code))
    if clearings:
        edits.append(_Destination(code, inner, is_before=True, indent=indent).put(clearings, code))
    yield Candidate("Steps once behind the loop over the micro-batches.", tuple(edits))


def _step_in_new_test(model: LoopModel, step: Site, group: Sequence[ast.stmt]) -> Iterator[Candidate]:
    """Yields the update in a test for the end of a window, with a count of rounds where the loop has none."""
    code, loop = step.code, model.micro_loop(step)
    index, edits = model.index_around(code, step.call), list[Edit]()
    if index is None:
        counted = _count_rounds(code, loop) if loop is not None else None
        if counted is None:
            return
        index, edits = counted
    indent, around = code.indent_of(group[0]), code.parents[group[0]]
    # The user's own unit of indentation.
    unit = indent[len(code.indent_of(around)) :] if isinstance(around, ast.stmt) else "    "
    clearings = _find_early_clearings(model, step, group)
    for steps in write_steps(model, code, step.call):
        done = f"({index.rounds_done})" if " " in index.rounds_done else index.rounds_done
        divisor = f"({steps.text})" if " " in steps.text else steps.text
        test = f"{done} % {divisor} == 0"
        body = "".join(code.lines_of(each, indent + unit) for each in [*group, *clearings])
        note = f"  # {steps.text} = micro-batches per update" if steps.is_number else ""
        first, last = group[0].lineno, group[-1].end_lineno or group[-1].lineno
        text = f"{indent}if {test}:{note}{code.line_end}{body}"
        between = [Edit(code.file, first, 0, last + 1, 0, text)]
        # Clearings of every micro-batch would still remove the gradients of the window.
        removed = [edit for each in clearings for edit in code.delete(each)]
        yield Candidate(f"Steps only where `{test}`.", join_edits(edits, removed, between))


def _count_rounds(code: Code, loop: Loop) -> tuple[Index, list[Edit]] | None:
    """Returns a variable that counts the rounds of `for x in loader`, and the edits that add it; None for others."""
    if not isinstance(loop, ast.For):
        return None
    scope = code.scope_of(loop)
    names = {node.id for node in ast.walk(scope) if isinstance(node, ast.Name)}
    names |= {node.arg for node in ast.walk(scope) if isinstance(node, ast.arg)}
    # A name that the function uses already would be overwritten.
    name = next((each for each in ("i", "step", "micro_step", "batch_index") if each not in names), None)
    if name is None:
        return None
    # `for x, y in loader` becomes `for i, (x, y) in enumerate(loader)`.
    target = code.text_of(loop.target)
    is_bare = isinstance(loop.target, ast.Tuple) and not target.startswith("(")
    target = f"({target})" if is_bare else target
    edits = [
        code.replace(loop.target, f"{name}, {target}"),
        code.replace(loop.iter, f"enumerate({code.text_of(loop.iter)})"),
    ]
    return Index(name, 0, ""), edits
