"""Replaces BatchNorm by a normalisation that does not depend on the micro-batch (GAV101).

Shapes: B samples of C channels, with any number of dimensions behind.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from gaverify.errors import ProblemError
from gaverify.torch_internals import has_forward_hooks, submodules_of

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BatchNorm = nn.modules.batchnorm._BatchNorm
_MOST_GROUPS = 32
"""Groups of a GroupNorm. Source: Y. Wu, K. He, Group Normalization, 2018, section 4.1 (table 3)."""
_LEAST_CHANNELS = 4  # per group where they fit: over one value alone a norm is always zero
Module = TypeVar("Module", bound=nn.Module)


def convert_batch_norm(model: Module, *, groups: int | None = None, in_place: bool = False) -> Module:
    """Returns the model with a GroupNorm in the place of every BatchNorm1d, 2d, 3d and SyncBatchNorm.

    Scale and shift (γ, β) stay the same parameters, so that an optimizer and tied weights keep them; a layer that is
    used in several places is replaced by one layer. GroupNorm has no running statistics: those of the layer are
    dropped, and a pretrained network has to be trained further. Hooks of a replaced layer are lost.

    Args:
        model: The model, left as it is.
        groups: Groups of every GroupNorm; None chooses per layer (`group_norm_for`).
        in_place: Convert the model itself and return it (a BatchNorm that is the model itself cannot be).

    Raises:
        ProblemError: A layer cannot be converted; the message names every such layer and nothing was changed.
    """
    if in_place and isinstance(model, KINDS):
        raise ProblemError("convert_batch_norm: the model is a BatchNorm itself; convert a copy (in_place=False)")
    problems = [
        f"`{name or '(root)'}` ({type(layer).__name__}) {problem}"
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and (problem := _problem(layer, groups))
    ]
    if problems:
        raise ProblemError("\n".join(f"convert_batch_norm: {problem}" for problem in problems))
    result = model if in_place else copy.deepcopy(model)
    replacements: dict[int, nn.Module] = {}
    layers = [layer for layer in result.modules() if isinstance(layer, KINDS)]
    for layer in layers:
        replacements[id(layer)] = group_norm_for(layer, groups)
        replacements[id(layer)].train(layer.training)
    # through the parents and not by name: `named_modules` shows a layer that is used twice under one name only
    for parent in list(result.modules()):
        for name, child in submodules_of(parent).items():
            if child is not None and id(child) in replacements:
                submodules_of(parent)[name] = replacements[id(child)]
    return replacements.get(id(result), result)  # type: ignore[return-value]  # a BatchNorm alone becomes another class


def only_normalises(layer: _BatchNorm) -> bool:
    """Returns whether a BatchNorm does what torch's does and no more, so that another normalisation can replace it."""
    if has_forward_hooks(layer):  # a hook may change the output
        return False
    if type(layer).forward is _BatchNorm.forward or type(layer) in KINDS:
        return True
    # A subclass with its own `forward` may add an activation, a mask or a residual. It is run: in training its output
    # on random numbers has to be that of `F.batch_norm`. On a copy, because the run changes its statistics.
    layer_copy = copy.deepcopy(layer).train()
    generator = torch.Generator().manual_seed(0)  # its own, because the user's draws must not move
    for inner in ((), (3,), (3, 3), (3, 3, 3)):
        x = torch.randn(4, layer.num_features, *inner, generator=generator, device="cpu")
        x = x.to(next((value for value in (layer.weight, layer.running_mean) if value is not None), x))
        try:
            with torch.no_grad():
                output = layer_copy(x)
        except Exception:  # the layer takes another number of dimensions
            continue
        plain = nn.functional.batch_norm(x, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)
        is_same_shape = isinstance(output, torch.Tensor) and output.shape == plain.shape
        return is_same_shape and torch.allclose(output, plain, atol=1e-5)
    return False


def group_norm_for(layer: _BatchNorm, groups: int | None = None) -> nn.GroupNorm:
    """Returns a GroupNorm over as many channels as a BatchNorm, with its ε, scale and shift.

    Without `groups`, their number is the largest up to 32 that leaves at least four channels in a group (two, where
    four do not fit).
    """
    groups = groups or _choose_groups(layer.num_features)
    norm = nn.GroupNorm(groups, layer.num_features, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        norm.weight, norm.bias = layer.weight, layer.bias
    return norm


def _choose_groups(channels: int) -> int:
    dividing = [groups for groups in range(1, min(_MOST_GROUPS, channels) + 1) if channels % groups == 0]
    for least in (_LEAST_CHANNELS, 2):
        fitting = [groups for groups in dividing if channels // groups >= least]
        if fitting:
            return max(fitting)
    return 1


def _problem(layer: _BatchNorm, groups: int | None) -> str | None:
    """Why a layer cannot be converted; None where it can."""
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
        return "is lazy and has not seen a batch; run the model once before"
    if type(layer) not in KINDS:  # and not `isinstance`: a subclass may do more
        return "is a class of its own that may do more than normalise; replace it by hand"
    if groups and layer.num_features % groups:
        return f"has {layer.num_features} channels, which {groups} groups do not divide"
    return None
