"""A candidate for a patch: edits of the user's source that may repair a finding; and edits that several repairs make.

Candidates are guesses from the shape of the source. The audit decides: it runs a copy with the edits.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gaverify.patches.code import Code
from gaverify.patches.loop import LoopModel
from gaverify.records.patch import Edit


@dataclass(frozen=True)
class Candidate:
    """Edits that may repair a finding."""

    title: str
    """How they change the source, as a sentence."""
    edits: tuple[Edit, ...]
    unsafe: str = ""
    """How they change the model or the meaning of a hyperparameter; "" where they do not."""


@dataclass(frozen=True)
class StepsText:
    """K as it is written at a place."""

    text: str
    is_number: bool = False

    def note(self, code: Code, statement: ast.stmt) -> list[Edit]:
        """The comment that explains a number, at the end of a statement's line; none where the line has one."""
        line = statement.lineno
        content = code.lines[line - 1].rstrip("\r\n")
        # A number says nothing to a reader: the comment tells that it is K. The line may not be continued.
        if not self.is_number or "#" in content or content.endswith("\\"):
            return []
        return [Edit(code.file, line, len(content), line, len(content), f"  # {self.text} = micro-batches per update")]


def write_steps(model: LoopModel, code: Code, node: ast.AST, most: int = 2) -> Iterator[StepsText]:
    """Yields how K can be written at a node: by the script's names, else as a number."""
    texts = model.find_steps_texts(code, node)
    yield from (StepsText(text) for text in texts[:most])
    # A number is right for this K alone, so it is written only where the script has no name for K.
    if not texts and model.steps > 1:
        yield StepsText(str(model.steps), is_number=True)


def divide(code: Code, node: ast.expr, divisor: str, operator: str = "/") -> Edit:
    """Returns the edit that divides an expression where it stands."""
    text = f"{code.operand(node, product=operator == '/')} {operator} {divisor}"
    parent = code.parents.get(node)
    # Parentheses that nothing needs would be noise in the user's diff.
    is_argument = isinstance(parent, ast.Call) and node in parent.args
    is_alone = isinstance(parent, ast.Return | ast.Assign | ast.AnnAssign | ast.keyword)
    if is_argument or is_alone or code.is_in_parentheses(node):
        return code.replace(node, text)
    return code.replace(node, f"({text})")


def drop_factor(code: Code, operation: ast.BinOp, kept: ast.expr) -> Edit:
    """Returns the edit that leaves only one operand of a product or a quotient."""
    return code.replace(operation, code.operand(kept))


def join_edits(*groups: Iterable[Edit]) -> tuple[Edit, ...]:
    """Returns all edits in one row."""
    return tuple(edit for group in groups for edit in group)
