"""The training loop as the source tells it: its calls, by the lines that the audit recorded; its boundary; its K.

A boundary is the test that is true in the last micro-batch of an accumulation window: `(i + 1) % K == 0`.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from gaverify.patches.code import Code, Function, Loop, callee_name
from gaverify.patches.sources import Context
from gaverify.records.audit import UpdateComparison
from gaverify.records.events import Backward, Clipping, Event, ScalerCall, SchedulerStep, Step, ZeroGrad
from gaverify.records.findings import Finding

_CALLS: dict[type[Event], tuple[str, ...]] = {
    Backward: ("backward", "manual_backward"),
    Step: ("step",),
    ZeroGrad: ("zero_grad",),
    Clipping: ("clip_grad_norm_", "clip_grad_value_", "clip_gradients", "clip_grad_norm"),
    SchedulerStep: ("step",),
    ScalerCall: ("unscale_", "update"),
}
_STEPS_NAME = re.compile(
    r"accum|grad_?acc|micro_?(steps|batches|count|num)|num_micro|n_micro|(steps|batches)_per_update"
)
"""Names that people give K."""

_DEEPEST = 4
"""Functions that are followed from a call to the loop around it."""


@dataclass(frozen=True)
class Site:
    """A call in the user's source that an audit recorded."""

    code: Code
    call: ast.Call

    @property
    def statement(self) -> ast.stmt:
        """The statement that it is part of."""
        return self.code.statement_of(self.call)


@dataclass(frozen=True)
class Index:
    """The variable that counts the rounds of a loop."""

    name: str
    start: int
    length: str
    """Text of the number of rounds; "" where none is known."""

    @property
    def rounds_done(self) -> str:
        """The number of rounds at the end of one."""
        return self.name if self.start == 1 else f"{self.name} + {1 - self.start}"

    @property
    def rounds_before(self) -> str:
        """The number of rounds before one."""
        return self.name if self.start == 0 else f"({self.name} - {self.start})"


class LoopModel:
    """Finds in the user's source what a patch needs to know.

    Args:
        context: The record and the sources.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.codes: dict[str, Code] = {}
        for file, source in context.sources.items():
            try:
                self.codes[file] = Code(file, source.text)
            except (SyntaxError, ValueError, RecursionError):  # a notebook's magics, say
                continue

    @property
    def update(self) -> UpdateComparison | None:
        """The update that the answer rests on."""
        record = self.context.record
        return record.divergent or next(iter(record.updates), None)

    @cached_property
    def steps(self) -> int:
        """K: the user's own number, else as many backward passes as the full batch's samples take."""
        # Not the number of passes in the window: a fault may have changed where it ends.
        record = self.context.record
        window = record.calls.window_of(self.update.number) if self.update is not None else record.calls.first
        expected = record.calls.expected_passes(window)
        return expected or record.calls.usual(record.calls.first) or 0

    def code_of(self, file: str | None) -> Code | None:
        """The source of a file that an event or a finding names."""
        return self.codes.get(os.path.realpath(file)) if file else None

    def find_sites(self, kind: type[Event]) -> list[Site]:
        """The calls of a kind in the accumulated run, each once, in the order of their first call."""
        places = dict.fromkeys(
            event.place
            for window in self.context.record.calls.windows
            for event in window.events
            if type(event) is kind and event.file is not None
        )
        sites: dict[ast.Call, Site] = {}
        for file, line in places:
            code = self.code_of(file)
            if code is not None and line is not None:
                for call in _find_calls(code, line, kind):
                    sites.setdefault(call, Site(code, call))
        return list(sites.values())

    def place_of_finding(self, finding: Finding) -> tuple[Code, int] | None:
        """The source and the line of a finding."""
        location = finding.location
        code = self.code_of(location.file) if location is not None else None
        return (code, location.line) if code is not None and location is not None and location.line else None

    # -- loops --------------------------------------------------------------------------------------------------------

    @cached_property
    def step_site(self) -> Site | None:
        """The call that steps."""
        return next(iter(self.find_sites(Step)), None)

    @cached_property
    def backward_site(self) -> Site | None:
        """The call that differentiates."""
        return next(iter(self.find_sites(Backward)), None)

    def micro_loop(self, site: Site) -> Loop | None:
        """The loop over micro-batches around a call."""
        return next(iter(site.code.loops_around(site.call)), None)

    def index_of(self, code: Code, loop: Loop) -> Index | None:
        """The variable that counts a loop's rounds; None where the loop has none."""
        if not isinstance(loop, ast.For | ast.AsyncFor):
            return None
        iterated = loop.iter
        # Progress bars hand on the items of the iterable that they are given.
        while callee_name(iterated) in ("tqdm", "trange", "progressbar", "track") and _arguments_of(iterated):
            iterated = _arguments_of(iterated)[0]
        if callee_name(iterated) == "enumerate" and isinstance(loop.target, ast.Tuple):
            first, arguments = loop.target.elts[0], _arguments_of(iterated)
            start = _start_of(iterated)
            # A start that is no number in the text leaves the number of rounds unknown.
            if isinstance(first, ast.Name) and arguments and start is not None:
                inner = arguments[0]
                while callee_name(inner) in ("tqdm", "track") and _arguments_of(inner):
                    inner = _arguments_of(inner)[0]
                length = f"len({code.text_of(inner)})" if isinstance(inner, ast.Name | ast.Attribute) else ""
                return Index(first.id, start, length)
        if callee_name(iterated) == "range" and isinstance(loop.target, ast.Name):
            arguments = _arguments_of(iterated)
            if len(arguments) == 1:
                is_name = isinstance(arguments[0], ast.Name | ast.Attribute | ast.Call)
                return Index(loop.target.id, 0, code.text_of(arguments[0]) if is_name else "")
            if len(arguments) == 2 and isinstance(arguments[0], ast.Constant) and arguments[0].value in (0, 1):
                return Index(loop.target.id, 1 if arguments[0].value else 0, "")
        return None

    def find_boundaries(self, code: Code, around: ast.AST) -> list[ast.expr]:
        """The tests below a node that ask whether a window ends: comparisons with a remainder of K."""
        tests: list[ast.expr] = []
        for node in ast.walk(around):
            # `(i + 1) % K == 0` and `not (i + 1) % K`.
            is_test = isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
            if is_test and isinstance(node, ast.expr) and any(map(_is_remainder, ast.iter_child_nodes(node))):
                tests.append(node)
            # A bare remainder is a test only where its truth is asked for; elsewhere it computes an index.
            elif isinstance(node, ast.BinOp) and _is_remainder(node):  # `if i % K: continue`
                parent = code.parents[node]
                if isinstance(parent, ast.BoolOp) or (isinstance(parent, ast.If) and parent.test is node):
                    tests.append(node)
        return sorted(tests, key=lambda node: (node.lineno, node.col_offset))

    def find_guards(self, site: Site) -> list[ast.If]:
        """The `if`s around a call inside its loop, the innermost first."""
        guards = []
        for node in site.code.nodes_around(site.call):
            if isinstance(node, Loop | Function | ast.ClassDef):
                break
            if isinstance(node, ast.If):
                guards.append(node)
        return guards

    def is_boundary(self, code: Code, test: ast.expr) -> bool:
        """Whether a test asks for the end of a window: by a remainder, a count, or a variable that holds that."""
        if self.find_boundaries(code, test) or self.count_test(code, test) is not None:
            return True
        # Accelerate says so itself.
        if any(isinstance(node, ast.Attribute) and node.attr == "sync_gradients" for node in ast.walk(test)):
            return True
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        scope = code.scope_of(test)
        assigned = [node for node in ast.walk(scope) if isinstance(node, ast.Assign)]
        # A function that does the step may be told by its caller that the window ends: `train_step(…, sync=…)`.
        caller = next(iter(_find_callers(code, test)), None)
        arguments = _match_arguments(scope, caller.call) if caller is not None and isinstance(scope, Function) else []
        if any(name in names and self.find_boundaries(code, value) for name, value in arguments):
            return True
        # `is_last = (i + 1) % K == 0` some lines before `if is_last:`.
        return any(
            isinstance(target, ast.Name) and target.id in names and bool(self.find_boundaries(code, node.value))
            for node in assigned
            for target in node.targets
        )

    def count_test(self, code: Code, test: ast.expr) -> tuple[ast.Compare, str] | None:
        """The comparison of a count with K in a test, `count == K`, and the text of K; None without one."""
        steps = [*self.find_steps_texts(code, test, by_remainders=False), str(self.steps)]
        for node in ast.walk(test):
            if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.left, ast.Name | ast.Attribute):
                bound = node.comparators[0]
                # `count == K - 1` counts from zero.
                without_one = bound.left if isinstance(bound, ast.BinOp) else bound
                if code.text_of(without_one) in steps and isinstance(node.ops[0], ast.Eq | ast.GtE | ast.Gt):
                    return node, code.text_of(without_one)
        return None

    def index_around(self, code: Code, node: ast.AST) -> Index | None:
        """The count of rounds that is known at a node: its loop's, or the parameter that a loop hands it as."""
        loops, scope = code.loops_around(node), code.scope_of(node)
        if loops:
            return self.index_of(code, loops[0])
        caller = next(iter(_find_callers(code, node)), None)
        loop = self.micro_loop(caller) if caller is not None else None
        index = self.index_of(code, loop) if loop is not None else None
        if caller is None or index is None or not isinstance(scope, Function):
            return None
        arguments = _match_arguments(scope, caller.call)
        names = [name for name, value in arguments if isinstance(value, ast.Name) and value.id == index.name]
        return Index(names[0], index.start, "") if names else None

    def find_callers(self, site: Site) -> list[Site]:
        """The calls of the function that holds a call, and of those around it, in the same file."""
        return _find_callers(site.code, site.call)

    def is_once_per_window(self, site: Site) -> bool:
        """Whether a call is made once per window as its text tells: under a test, or outside of the inner loop."""
        backward = self.backward_site
        for each in (site, *self.find_callers(site)):
            if any(self.is_boundary(each.code, guard.test) for guard in self.find_guards(each)):
                return True
            if self._follows_skip(each):
                return True
        # Nested loops: a call outside of the loop that differentiates, and inside the next one, runs once per window.
        if backward is None or backward.code is not site.code:
            return False
        loops, of_backward = self._loops(site), self._loops(backward)
        return len(of_backward) > 1 and of_backward[0] not in loops and of_backward[1] in loops

    def _loops(self, site: Site) -> list[Loop]:
        """The loops around a call and around the calls of its function, the innermost first."""
        return [loop for each in (site, *self.find_callers(site)) for loop in each.code.loops_around(each.call)]

    def _follows_skip(self, site: Site) -> bool:
        """Whether a test before a call in its block goes on with the next round unless a window ends."""
        block = site.code.block_of(site.statement)
        before = block[: next(at for at, each in enumerate(block) if each is site.statement)]
        skips = [each for each in before if isinstance(each, ast.If)]
        return any(
            isinstance(each.body[-1], ast.Continue | ast.Return) and self.is_boundary(site.code, each.test)
            for each in skips
        )

    # -- K ------------------------------------------------------------------------------------------------------------

    def find_steps_texts(self, code: Code, node: ast.AST, *, by_remainders: bool = True) -> list[str]:
        """Expressions for K that can be written at a node, the likeliest first; the number itself is not among them."""
        texts: list[str] = []
        visible = _visible_names(code, node)
        # The right side of a remainder is K wherever a script tests for the end of a window.
        scope = code.scope_of(node)
        for around in (scope, code.tree) if by_remainders else ():
            for boundary in self.find_boundaries(code, around):
                texts += [code.text_of(right) for right in _moduli_of(boundary) if self._is_usable(right, visible)]
        # Names of the function itself come before those of the module, which may be defaults.
        own_names = _visible_names(code, node, outer=False) if isinstance(scope, Function) else set()
        texts += sorted(name for name in own_names if _STEPS_NAME.search(name.lower()))
        texts += [
            code.text_of(value)
            for value in _find_names_like_steps(code)
            if self._is_usable(value, visible) and not _is_assigned_at(code, value)
        ]
        texts += _find_options_like_steps(code, visible)
        texts += self._steps_of_frameworks(code, node, visible)
        texts += sorted(name for name in visible if _STEPS_NAME.search(name.lower()))
        texts += self._steps_of_chunks(code, node)
        # Numbers are no names: `write_steps` writes one where nothing else is left.
        numbers = {str(self.steps)}
        return [text for text in dict.fromkeys(texts) if text not in numbers and not text.isdigit()]

    def _steps_of_frameworks(self, code: Code, node: ast.AST, visible: set[str]) -> Iterator[str]:
        """Yields K as a framework's own objects hold it."""
        scope = code.scope_of(node)
        name = scope.name if isinstance(scope, Function) else ""
        # The methods in which frameworks call the user's code; `self` then is a Trainer or a LightningModule.
        if name == "compute_loss":
            yield "self.args.gradient_accumulation_steps"
        if name == "training_step":
            yield "self.trainer.accumulate_grad_batches"
        if "accelerator" in visible:
            yield "accelerator.gradient_accumulation_steps"

    def _steps_of_chunks(self, code: Code, node: ast.AST) -> Iterator[str]:
        """Yields K where the loop's own sequence of micro-batches tells it."""
        for loop in code.loops_around(node)[:1]:
            if not isinstance(loop, ast.For):
                continue
            iterated = loop.iter
            if callee_name(iterated) in ("zip", "enumerate", "tqdm") and _arguments_of(iterated):
                iterated = _arguments_of(iterated)[0]
                if callee_name(iterated) == "zip" and _arguments_of(iterated):
                    iterated = _arguments_of(iterated)[0]
            arguments = _arguments_of(iterated)
            if callee_name(iterated) == "range" and len(arguments) == 1 and not isinstance(arguments[0], ast.Constant):
                yield code.text_of(arguments[0])
            if callee_name(iterated) == "islice" and len(arguments) == 2:
                yield code.text_of(arguments[1])
            if callee_name(iterated) in ("chunk", "tensor_split") and arguments:
                count = arguments[0] if len(arguments) == 1 or _is_method(iterated) else arguments[1]
                if not isinstance(count, ast.Constant):
                    yield code.text_of(count)
            # Only an inner loop runs over the micro-batches of one update; an outer one runs over a whole loader.
            if isinstance(iterated, ast.Name) and len(code.loops_around(node)) > 1:
                yield f"len({iterated.id})"

    def _is_usable(self, node: ast.expr, visible: set[str]) -> bool:
        """Whether an expression can be written where these names are known."""
        if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            return False
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return names <= visible


def _find_callers(code: Code, node: ast.AST) -> list[Site]:
    """The calls of the function that holds a node, and of those around it."""
    callers: list[Site] = []
    scope = code.scope_of(node)
    # A function that is called in two places belongs to no one loop.
    while isinstance(scope, Function) and len(callers) < _DEEPEST:
        calls = [each for each in ast.walk(code.tree) if isinstance(each, ast.Call) and callee_name(each) == scope.name]
        outside = [call for call in calls if code.scope_of(call) is not scope]
        if len(outside) != 1:
            break
        callers.append(Site(code, outside[0]))
        scope = code.scope_of(outside[0])
    return callers


def _match_arguments(function: Function, call: ast.Call) -> list[tuple[str, ast.expr]]:
    """The parameters of a function with the expressions that a call gives for them."""
    parameters = [each.arg for each in function.args.args]
    parameters = parameters[1:] if parameters[:1] == ["self"] else parameters
    pairs = [*zip(parameters, call.args, strict=False)]
    return pairs + [(each.arg, each.value) for each in call.keywords if each.arg is not None]


def _find_calls(code: Code, line: int, kind: type[Event]) -> list[ast.Call]:
    calls = [node for node in code.nodes_at(line) if isinstance(node, ast.Call) and callee_name(node) in _CALLS[kind]]
    if kind in (Step, SchedulerStep) and len(calls) > 1:
        is_wanted = {Step: False, SchedulerStep: True}[kind]
        calls = [call for call in calls if ("sched" in code.text_of(call.func).lower()) is is_wanted]
    return calls[:1]


def _arguments_of(call: ast.AST) -> Sequence[ast.expr]:
    return call.args if isinstance(call, ast.Call) else ()


def _is_method(call: ast.AST) -> bool:
    """Whether a call is one of a value, and not of a module's function."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    return not (isinstance(call.func.value, ast.Name) and call.func.value.id in ("torch", "np", "numpy"))


def _start_of(call: ast.AST) -> int | None:
    """From where `enumerate` counts; None where that is no number in the text."""
    if not isinstance(call, ast.Call):
        return None
    starts = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "start")]
    if not starts:
        return 0
    value = starts[0].value if isinstance(starts[0], ast.Constant) else None
    return value if isinstance(value, int) and value in (0, 1) else None


def _is_remainder(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)


def remainder_of(test: ast.expr) -> ast.BinOp | None:
    """The remainder in a test of a boundary."""
    return next(
        (node for node in ast.walk(test) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)),
        None,
    )


def _moduli_of(test: ast.expr) -> list[ast.expr]:
    remainder = remainder_of(test)
    return [remainder.right] if remainder is not None else []


def _visible_names(code: Code, node: ast.AST, *, outer: bool = True) -> set[str]:
    """The names that are known at a node: parameters, and what is assigned or imported before it or in the module."""
    names: set[str] = set()
    line = getattr(node, "lineno", 0)
    scopes = [each for each in code.nodes_around(node) if isinstance(each, Function | ast.Module | ast.Lambda)]
    for scope in scopes if outer else scopes[:1]:
        if isinstance(scope, Function | ast.Lambda):
            arguments = scope.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            names |= {argument.arg for argument in every if argument is not None}
        is_inner = scope is scopes[0]
        for each in _statements_of(scope):
            if is_inner and each.lineno >= line:
                continue
            names |= _names_bound_by(each)
    return names


def _statements_of(scope: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a scope, without those of functions and classes in it."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            yield from _statements_of(node)


def _names_bound_by(statement: ast.stmt) -> set[str]:
    """The names that a statement binds itself."""
    if isinstance(statement, Function | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        targets = [statement.target]
    elif isinstance(statement, ast.With | ast.AsyncWith):
        targets = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def _find_names_like_steps(code: Code) -> list[ast.expr]:
    """Expressions of the source whose last name is one that people give K: `args.accum`, `config["accum"]`."""
    expressions: list[ast.expr] = []
    for node in ast.walk(code.tree):
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            name = str(node.slice.value)
        if name and _STEPS_NAME.search(name.lower()) and isinstance(node, ast.expr):
            expressions.append(node)
    return expressions


def _find_options_like_steps(code: Code, visible: set[str]) -> Iterator[str]:
    """Yields the parsed options of the source whose name is one that people give K, used or not."""
    nodes = list(ast.walk(code.tree))
    parsed = [
        node.targets[0].id
        for node in nodes
        if isinstance(node, ast.Assign) and callee_name(node.value) == "parse_args"
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id in visible
    ]
    for call in nodes:
        for word in call.args if isinstance(call, ast.Call) and callee_name(call) == "add_argument" else ():
            name = str(word.value).lstrip("-").replace("-", "_") if isinstance(word, ast.Constant) else ""
            if _STEPS_NAME.search(name.lower()):
                yield from (f"{options}.{name}" for options in parsed)


def _is_assigned_at(code: Code, node: ast.expr) -> bool:
    """Whether a node is called, or is part of a longer name."""
    parent = code.parents.get(node)
    return isinstance(parent, ast.Attribute) or (isinstance(parent, ast.Call) and parent.func is node)
