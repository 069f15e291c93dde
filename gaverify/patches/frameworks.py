"""Repairs for frameworks that accumulate themselves: they are told K, and calls move into their own tests.

Accelerate, the Trainer of transformers and Lightning divide the loss and skip steps as soon as they know K.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gaverify.patches.candidates import Candidate, join_edits, write_steps
from gaverify.patches.code import Code, callee_name
from gaverify.patches.loop import LoopModel, Site
from gaverify.patches.placement import find_movable_statement
from gaverify.records.events import Clipping, SchedulerStep, Step, ZeroGrad
from gaverify.records.findings import Finding

_KEYWORDS = {
    "Accelerator": "gradient_accumulation_steps",
    "TrainingArguments": "gradient_accumulation_steps",
    "Trainer": "accumulate_grad_batches",
}
"""The keyword by which each framework is told K."""


def tell_steps(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields a framework that is told K (GAV601)."""
    for code in model.codes.values():
        for call in ast.walk(code.tree):
            keyword = _KEYWORDS.get(callee_name(call))
            if keyword is None or not isinstance(call, ast.Call) or not _accumulates(code, call):
                continue
            present = next((each for each in call.keywords if each.arg == keyword), None)
            # An expression there is the user's own K, and right or wrong for a reason that its text does not tell.
            if present is not None and not isinstance(present.value, ast.Constant):
                continue
            for steps in write_steps(model, code, call):
                if present is not None:
                    edits = (code.replace(present.value, steps.text),)
                elif call.args or call.keywords:
                    # A keyword may stand only behind all other arguments.
                    last = [*call.args, *(each.value for each in call.keywords)][-1]
                    end = code.span(last)[1]
                    edits = (code.replace_between(end, end, f", {keyword}={steps.text}"),)
                else:
                    line, column = code.span(call)[1]
                    edits = (code.replace_between((line, column - 1), (line, column - 1), f"{keyword}={steps.text}"),)
                yield Candidate(f"Sets `{keyword}` of `{callee_name(call)}` to `{steps.text}`.", edits)


def _accumulates(code: Code, call: ast.Call) -> bool:
    """Whether a framework is asked to accumulate: the transformers' Trainer is told K by its arguments alone."""
    # Without `accelerator.accumulate` K would divide the loss, and nothing would skip a step.
    if callee_name(call) == "Accelerator":
        return any(callee_name(node) == "accumulate" for node in ast.walk(code.tree))
    is_lightning = "training_step" in code.text
    return callee_name(call) == "TrainingArguments" or is_lightning


def guard_by_accelerator(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields calls that are made only where Accelerate has all micro-batches of an update (GAV601 to GAV607)."""
    kinds = {"GAV606": Clipping, "GAV607": SchedulerStep, "GAV603": ZeroGrad, "GAV601": Step}
    kind = kinds.get(finding.code)
    for site in model.find_sites(kind) if kind is not None else ():
        accelerator = _find_accelerator(site)
        statement = find_movable_statement(model, site)
        if not accelerator or statement is None:
            continue
        code = site.code
        indent = code.indent_of(statement)
        with_statement = code.parents[statement]
        # The user's own unit of indentation: the statement's indent less that of the block around it.
        unit = indent[len(code.indent_of(with_statement)) :] if isinstance(with_statement, ast.stmt) else "    "
        test = f"{indent}if {accelerator}.sync_gradients:{code.line_end}"
        text = test + code.lines_of(statement, indent + (unit or "    "))
        edits = join_edits(code.delete(statement), [code.insert_before(statement, text)])
        yield Candidate(f"Makes this call only where `{accelerator}.sync_gradients`.", edits)


def _find_accelerator(site: Site) -> str:
    """The text of the accelerator whose `accumulate` surrounds a call; "" where none does."""
    for node in site.code.nodes_around(site.call):
        for item in node.items if isinstance(node, ast.With) else ():
            func = item.context_expr.func if isinstance(item.context_expr, ast.Call) else None
            if isinstance(func, ast.Attribute) and func.attr == "accumulate":
                return site.code.text_of(func.value)
    return ""
