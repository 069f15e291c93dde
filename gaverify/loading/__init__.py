"""From a spec to a problem: a built-in, or the user's own factory. The only room that imports user code."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gaverify.errors import ProblemError
from gaverify.isolation import isolated_generators
from gaverify.loading.bare import DEFAULT_BATCH_SIZE, bare_problem
from gaverify.loading.calling import call_factory, check_types
from gaverify.loading.importing import import_factory
from gaverify.problem import Problem
from gaverify.zoo import find_builtin
from gaverify.zoo.arguments import at_least

if TYPE_CHECKING:
    from gaverify.spec import Spec


def load_problem(spec: Spec) -> Problem:
    """Returns the problem that `spec.model` names, built with `spec.seed`.

    A factory's parameter that is named like an option (`batch_size`, `data`, `pretrained`, `ignore_index`) gets the
    option's value where one is given. Device, precision and mode are not touched. The generators are restored; what
    importing the user's code does to `sys.path` and `sys.modules` stays, as with `python -m`.

    Raises:
        SpecError: There is no such built-in, module, file or attribute, or an option or argument does not fit.
        ProblemError: The user's code raised, or returned something that is no problem.
    """
    with isolated_generators():
        _seed(spec.seed)
        if ":" in spec.model or spec.model.endswith(".py"):
            factory = import_factory(spec.model)
            _seed(spec.seed)  # what the import drew, or NumPy's arrival, must not change what the factory builds
            problem = _problem(_built(factory, spec), spec)
        else:
            problem = _builtin(spec)
    return replace(problem, name=problem.name or spec.model)


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)  # NumPy takes 32 bits


def _builtin(spec: Spec) -> Problem:
    builtin = find_builtin(spec.model)
    build = import_module(builtin.module).build
    check_types(build, spec.model, spec.model_args)
    batch_size = spec.batch_size or builtin.default_batch_size
    at_least(1, batch_size=int(spec.model_args.get("batch_size", batch_size)))
    problem: Problem = call_factory(
        build, spec.model, spec.model_args, {**_options(spec), "batch_size": batch_size}, own=True
    )
    _check_bare_options(spec, "is a built-in with its own batch and loss")
    return problem


def _built(factory: Any, spec: Spec) -> Any:
    """What the factory returns; an object that is built already comes back as it is."""
    if isinstance(factory, Problem | nn.Module | tuple):
        given = [f"`--model-arg {name}`" for name in spec.model_args]
        given += [f"`--{name.replace('_', '-')}`" for name in _options(spec) if name != "batch_size"]
        if given:
            raise ProblemError(f"`{spec.model}` is built already and cannot take {', '.join(given)}; name a function")
        return factory
    if not callable(factory):
        raise ProblemError(f"`{spec.model}` is {_a(factory)}, not a factory; {_EXPECTED}")
    return call_factory(factory, spec.model, spec.model_args, _options(spec), own=False)


def _options(spec: Spec) -> dict[str, Any]:
    """The options that were given and that a factory may have a parameter for."""
    options = {name: getattr(spec, name) for name in ("batch_size", "data", "pretrained")}
    if spec.ignore_index != type(spec).model_fields["ignore_index"].default:
        options["ignore_index"] = spec.ignore_index
    return {name: value for name, value in options.items() if value is not None}


_EXPECTED = "a factory returns a gaverify.Problem, a tuple (model, loss, batch) or a torch.nn.Module"


def _problem(built: Any, spec: Spec) -> Problem:
    """Returns a problem for each thing that a factory may return."""
    if isinstance(built, nn.Module):
        return bare_problem(
            built, spec.model, spec.input_shape, spec.loss, spec.classes, spec.batch_size or DEFAULT_BATCH_SIZE
        )
    _check_bare_options(spec, "brings its own batch and loss")
    if isinstance(built, tuple):
        if len(built) != 3:
            raise ProblemError(f"`{spec.model}` returned a tuple of {len(built)}; return (model, loss, batch)")
        built = Problem(*built)
    if not isinstance(built, Problem):
        advice = "is its `return` missing? " if built is None else ""
        raise ProblemError(f"`{spec.model}` returned {_a(built)}; {advice}{_EXPECTED}")
    if not isinstance(built.model, nn.Module):
        raise ProblemError(
            f"`{spec.model}`: the model is {_a(built.model)}, not a torch.nn.Module; the order is (model, loss, batch)"
        )
    if not callable(built.loss):
        raise ProblemError(
            f"`{spec.model}`: the loss is {_a(built.loss)}; write a function `loss(model, batch)` that returns a scalar"
        )
    return built


def _check_bare_options(spec: Spec, reason: str) -> None:
    """Raises for options that only a bare module has a use for, rather than to ignore them."""
    values = {"--input-shape": spec.input_shape, "--loss": spec.loss, "--classes": spec.classes}
    given = [option for option, value in values.items() if value is not None]
    if given:
        raise ProblemError(
            f"`{spec.model}` {reason}; {', '.join(given)} {'is' if len(given) == 1 else 'are'} for a factory that "
            "returns a bare torch.nn.Module: leave out"
        )


def _a(thing: Any) -> str:
    if thing is None:
        return "None"
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
