"""Repairs of the model: BatchNorm is replaced by GroupNorm, which normalises each sample alone (GAV101).

This makes another model, so such patches are unsafe.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gaverify.patches.candidates import Candidate
from gaverify.patches.code import Code, Function, callee_name
from gaverify.patches.loop import LoopModel
from gaverify.records.findings import Finding
from gaverify.records.patch import Edit

_UNSAFE = "GroupNorm in place of BatchNorm makes another model, which has to be trained from the beginning"

_LAYERS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
_MOST_GROUPS, _LEAST_CHANNELS = 32, 4
"""Those of `gaverify.remedies.convert_batch_norm`."""


def replace_layers(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields a GroupNorm for every BatchNorm that the source makes: where one is a cause, the others are as well."""
    layers = [
        (code, node)
        for code in model.codes.values()
        for node in ast.walk(code.tree)
        if callee_name(node) in _LAYERS and isinstance(node, ast.Call)
    ]
    edits = [edit for code, call in layers for edit in _replace_layer(code, call)]
    # One BatchNorm that stays would leave a difference: all of them are replaced, or none.
    if layers and len(edits) == len(layers):
        yield Candidate("Replaces BatchNorm by GroupNorm.", tuple(edits), _UNSAFE)


def _replace_layer(code: Code, call: ast.Call) -> list[Edit]:
    """Returns the edit that makes a GroupNorm of a BatchNorm with its ε and its scale; none where that is not known."""
    # `BatchNorm2d(64)` imported by its name says nothing about where GroupNorm is; `nn.BatchNorm2d(64)` does.
    if not isinstance(call.func, ast.Attribute) or any(isinstance(each, ast.Starred) for each in call.args):
        return []
    arguments_by_name = dict(zip(("num_features", "eps", "momentum", "affine"), call.args, strict=False))
    arguments_by_name |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    channels = arguments_by_name.get("num_features")
    # `**settings` may hold any of the arguments.
    if channels is None or any(keyword.arg is None for keyword in call.keywords):
        return []
    settings = [
        f", {name}={code.text_of(arguments_by_name[name])}" for name in ("eps", "affine") if name in arguments_by_name
    ]
    arguments = f"{_choose_groups(channels)}, {code.text_of(channels)}{''.join(settings)}"
    return [code.replace(call, f"{code.text_of(call.func.value)}.GroupNorm({arguments})")]


def _choose_groups(channels: ast.expr) -> int:
    """The most groups that leave enough channels in each; one where the number of channels is not in the text."""
    number = channels.value if isinstance(channels, ast.Constant) else None
    if not isinstance(number, int):
        return 1
    fitting = (groups for groups in range(_MOST_GROUPS, 0, -1) if number % groups == 0)
    return next((groups for groups in fitting if number // groups >= _LEAST_CHANNELS), 1)


def replace_batch_norm(model: LoopModel, finding: Finding) -> Iterator[Candidate]:
    """Yields a model whose BatchNorm layers are converted, where its parameters are handed to an optimizer."""
    # Layers that the source does not make itself (torchvision's) can only be converted in the finished model.
    for code in model.codes.values():
        for text, node in _find_trained_models(code):
            assigned = _find_assignment(code, text, node)
            if assigned is None:
                continue
            line = f"{code.indent_of(assigned)}{text} = convert_batch_norm({text}){code.line_end}"
            edits = (_add_import(code), code.insert_after(assigned, line))
            title = f"Replaces the BatchNorm layers of `{text}` by GroupNorm."
            yield Candidate(title, edits, _UNSAFE)


def _find_trained_models(code: Code) -> Iterator[tuple[str, ast.Call]]:
    """Yields the models whose parameters a call is given."""
    for node in ast.walk(code.tree):
        if callee_name(node) in ("parameters", "named_parameters") and isinstance(node, ast.Call):
            func = node.func
            if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name | ast.Attribute):
                yield code.text_of(func.value), node


def _find_assignment(code: Code, text: str, node: ast.AST) -> ast.stmt | None:
    """The last statement before a node that assigns a name, in the node's scope or the module."""
    line = getattr(node, "lineno", 0)
    scope = code.scope_of(node)
    scopes = [scope, code.tree] if isinstance(scope, Function) else [scope]
    # A model may be made in the module and handed to a function, whose parameter is not assigned.
    for each in scopes:
        assignments = [
            statement
            for statement in ast.walk(each)
            if isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and code.text_of(statement.targets[0]) == text
            and (statement.lineno < line or each is not scope)
        ]
        if assignments:
            return max(assignments, key=lambda statement: statement.lineno)
    return None


def _add_import(code: Code) -> Edit:
    """Returns the edit that imports the conversion behind the source's own imports."""
    imports = [node for node in code.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    text = f"from gaverify.remedies import convert_batch_norm{code.line_end}"
    return code.insert_after(imports[-1], text) if imports else code.insert_before(code.tree.body[0], text)
