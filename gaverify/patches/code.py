"""A parsed source: its nodes by line, the nodes around them, and edits of their text that touch nothing else.

`ast` finds the places; the edits cut the text itself. Unparsing a tree would lose comments and layout.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property

from gaverify.patches.sources import split_lines
from gaverify.records.patch import Edit

Loop = ast.For | ast.AsyncFor | ast.While
Function = ast.FunctionDef | ast.AsyncFunctionDef
_STICKS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant)
"""Expressions that need no parentheses beside an operator."""


class Code:
    """The tree of a file and its text.

    Args:
        file: Its path.
        text: Its text, which parses.
    """

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        # `ast` refuses a byte-order mark in a text. Form feeds of as many bytes keep the columns, and indent nothing.
        self.tree = ast.parse(re.sub("^\ufeff", "\f\f\f", text))
        self.lines = split_lines(text)
        self.line_end = "\r\n" if "\r\n" in text else "\n"

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def nodes_around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields what surrounds a node, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that holds a node, or is it."""
        return next(each for each in (node, *self.nodes_around(node)) if isinstance(each, ast.stmt))

    def scope_of(self, node: ast.AST) -> Function | ast.Module:
        """The function around a node, or the module."""
        return next(each for each in self.nodes_around(node) if isinstance(each, Function | ast.Module))

    def loops_around(self, node: ast.AST) -> list[Loop]:
        """The loops around a node in its function, the innermost first."""
        loops: list[Loop] = []
        for each in self.nodes_around(node):
            if isinstance(each, Function | ast.ClassDef):
                break
            if isinstance(each, Loop):
                loops.append(each)
        return loops

    def nodes_at(self, line: int) -> list[ast.expr | ast.stmt]:
        """The expressions and statements that span a line, the shortest first."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.expr | ast.stmt)]
        spanning = [node for node in nodes if node.lineno <= line <= (node.end_lineno or 0)]
        return sorted(spanning, key=lambda node: (node.end_lineno or 0) - node.lineno)

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that holds one."""
        parent = self.parents[statement]
        blocks = [value for value in vars(parent).values() if isinstance(value, list)]
        return next(block for block in blocks if any(each is statement for each in block))

    # -- text ---------------------------------------------------------------------------------------------------------

    def column(self, line: int, offset: int) -> int:
        """The column in characters of an offset in UTF-8 bytes, as trees give it."""
        return len(self.lines[line - 1].encode()[:offset].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
        """Both ends of a node in lines and characters."""
        last_line, last = node.end_lineno or node.lineno, node.end_col_offset or 0
        return (node.lineno, self.column(node.lineno, node.col_offset)), (last_line, self.column(last_line, last))

    def text_of(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node."""
        return self.text_between(*self.span(node))

    def text_between(self, first: tuple[int, int], last: tuple[int, int]) -> str:
        """The text between two places."""
        if first[0] == last[0]:
            return self.lines[first[0] - 1][first[1] : last[1]]
        middle = self.lines[first[0] : last[0] - 1]
        return "".join([self.lines[first[0] - 1][first[1] :], *middle, self.lines[last[0] - 1][: last[1]]])

    def operand(self, node: ast.expr, *, product: bool = False) -> str:
        """The text of an expression as an operand of a product.

        Args:
            node: The expression.
            product: Whether it stands first, where a product needs no parentheses.
        """
        binds = product and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)
        return self.text_of(node) if isinstance(node, _STICKS) or binds else f"({self.text_of(node)})"

    def is_in_parentheses(self, node: ast.expr) -> bool:
        """Whether the text has parentheses of its own around an expression, which may be those of a call."""
        (line, column), (last_line, last) = self.span(node)
        before = "".join([*self.lines[: line - 1], self.lines[line - 1][:column]]).rstrip()
        after = self.lines[last_line - 1][last:] + "".join(self.lines[last_line : last_line + 1])
        return before.endswith("(") and after.lstrip().startswith(")")

    def indent_of(self, statement: ast.stmt) -> str:
        """The white space in front of a statement's first line."""
        line = self.lines[statement.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    def first_line(self, statement: ast.stmt) -> int:
        """The first line of a statement, with its decorators."""
        decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
        return min([statement.lineno, *(each.lineno for each in decorators)])

    def owns_lines(self, statement: ast.stmt) -> bool:
        """Whether a statement shares its lines with no other code; a comment behind it counts as its own."""
        (line, column), (last_line, last) = self.span(statement)
        behind = self.lines[last_line - 1][last:].strip()
        return not self.lines[line - 1][:column].strip() and (not behind or behind.startswith("#"))

    def lines_of(self, statement: ast.stmt, indent: str) -> str:
        """The whole lines of a statement, moved to another indent."""
        old_indent = self.indent_of(statement)
        lines = self.lines[statement.lineno - 1 : statement.end_lineno]
        indented = [indent + line[len(old_indent) :] if line.startswith(old_indent) else line for line in lines]
        text = "".join(indented)
        return text if text.endswith(("\n", "\r")) else text + self.line_end

    # -- edits --------------------------------------------------------------------------------------------------------

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        """Returns the edit that puts a text in a node's place."""
        first, last = self.span(node)
        return Edit(self.file, *first, *last, text)

    def replace_between(self, first: tuple[int, int], last: tuple[int, int], text: str) -> Edit:
        """Returns the edit that puts a text between two places."""
        return Edit(self.file, *first, *last, text)

    def insert_before(self, statement: ast.stmt, text: str) -> Edit:
        """Returns the edit that puts whole lines before a statement."""
        line = self.first_line(statement)
        return Edit(self.file, line, 0, line, 0, text)

    def insert_after(self, statement: ast.stmt, text: str) -> Edit:
        """Returns the edit that puts whole lines behind a statement and its comment."""
        line = statement.end_lineno or statement.lineno
        if line < len(self.lines) or self.lines[line - 1].endswith(("\n", "\r")):
            return Edit(self.file, line + 1, 0, line + 1, 0, text)
        end = len(self.lines[line - 1])
        return Edit(self.file, line, end, line, end, self.line_end + text.rstrip("\r\n"))

    def delete(self, statement: ast.stmt) -> list[Edit]:
        """Returns the edits that remove a statement with its lines; none where other code shares them or needs it."""
        if not self.owns_lines(statement) or len(self.block_of(statement)) == 1:
            return []
        last = statement.end_lineno or statement.lineno
        if last < len(self.lines):
            return [Edit(self.file, statement.lineno, 0, last + 1, 0, "")]
        return [Edit(self.file, statement.lineno, 0, last, len(self.lines[last - 1]), "")]


def callee_name(call: ast.AST) -> str:
    """The last name of what a call calls; "" for other nodes."""
    if not isinstance(call, ast.Call):
        return ""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
