"""Builds the problem that a spec names: calls the factory with the arguments it accepts, checks what it returns."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gaverify.errors import (
    GaverifyError,
    MissingPackage,
    ProblemError,
    SpecError,
    exit_call,
    is_out_of_memory,
    kind_of_value,
    nearest,
)
from gaverify.loading.adapting import (
    as_loss,
    first_batch,
    forward_loss,
    has_training_step,
    training_batch,
    training_step_loss,
)
from gaverify.loading.bare import DEFAULT_BATCH_SIZE, bare_problem
from gaverify.loading.importing import describe_error, import_factory, missing_package, raised_at
from gaverify.loading.naming import Kind, kind_of
from gaverify.loading.pretrained import load_pretrained, random_batch, speaks_transformers
from gaverify.passes.isolation import isolated_generators
from gaverify.passes.problem import Problem
from gaverify.zoo import find_builtin
from gaverify.zoo.arguments import at_least

if TYPE_CHECKING:
    from gaverify.spec import Spec


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def call_factory(
    factory: Callable[..., Any], name: str, arguments: Mapping[str, Any], options: Mapping[str, Any], *, own: bool
) -> Any:
    """Returns what the factory returns.

    Args:
        factory: A function or a class.
        name: What `--model` said.
        arguments: `--model-arg`s; each must be accepted.
        options: Options that were given, by field. Each goes to the parameter of its name; one without is an error,
            except the batch size: who cuts a batch or generates one serves it afterwards.
        own: Whether it is a built-in: what that raises unforeseen is a fault of gaverify and passes through.

    Raises:
        SpecError: An argument is unknown or missing; all of them at once.
        ProblemError: The factory raised.
    """
    accepted, anything, required = _parameters(factory)
    if required[:1] == ["self"]:
        raise SpecError(
            f"`{name}` is a method that needs an object; name a function, a class or a static method", "model"
        )
    passed = {option: value for option, value in options.items() if option in accepted}
    problems = (
        [] if anything else [_unknown(argument, name, accepted) for argument in arguments if argument not in accepted]
    )
    problems += [
        _describe_unused_option(option, name) for option in options if option not in accepted and option != "batch_size"
    ]
    problems += [
        f"`{name}` needs the argument `{parameter}`; give `--model-arg {parameter}=…`"
        for parameter in required
        if parameter not in passed and parameter not in arguments
    ]
    if problems:
        raise SpecError(problems, "model")
    try:
        return factory(**{**passed, **arguments})
    except (GaverifyError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a factory may raise SystemExit or GeneratorExit as well
        if own or is_out_of_memory(error):  # the command line has advice for the latter
            raise
        if isinstance(error, SystemExit):
            raise ProblemError(f"`{name}` called {exit_call(error)}{raised_at(error)}") from error
        if missing := missing_package(error):
            text = f"`{name}` raised {describe_error(error)}; install the package that has `{missing}`"
            raise MissingPackage(text) from error
        raise ProblemError(f"`{name}` raised {describe_error(error)}") from error


def check_types(build: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> None:
    """Raises `SpecError` for arguments of a built-in that are of another type than their defaults."""
    problems = []
    for parameter in inspect.signature(build).parameters.values():
        kind = type(parameter.default)
        value = arguments.get(parameter.name, parameter.default)
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits:
            problems.append(
                f"model argument `{parameter.name}` of `{name}` must be {_KINDS[kind]}, got {value!r}; "
                f"its default is {parameter.default!r}"
            )
    if problems:
        raise SpecError(problems, "model")


def _parameters(factory: Callable[..., Any]) -> tuple[list[str], bool, list[str]]:
    """Returns the names that can be passed as keywords, whether any other can too, and those without a default."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # written in C: it has to say itself what it does not take
        return [], True, []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return [p.name for p in named], anything, [p.name for p in named if p.default is p.empty]


def _unknown(argument: str, name: str, accepted: list[str]) -> str:
    if not accepted:
        return f"`{name}` takes no argument `{argument}`, nor any other"
    near = nearest(argument, accepted)
    advice = f"did you mean `{near}`? It" if near else "it"
    return f"`{name}` takes no argument `{argument}`; {advice} takes {', '.join(f'`{word}`' for word in accepted)}"


def _describe_unused_option(option: str, name: str) -> str:
    word = option.replace("_", "-")
    return f"--{word}: `{name}` has no parameter `{option}` for it; leave it out"


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
        kind = kind_of(spec.model)
        if kind is Kind.BUILTIN:
            problem = _builtin(spec)
        elif kind is Kind.TRANSFORMERS:
            problem = _problem_of_pretrained(spec)
        else:
            factory = import_factory(spec.model)
            _seed(spec.seed)  # what the import drew, or NumPy's arrival, must not change what the factory builds
            problem = _problem(_build_from_factory(factory, spec), spec)
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


def _build_from_factory(factory: Any, spec: Spec) -> Any:
    """What the factory returns; an object that is built already comes back as it is."""
    if isinstance(factory, Problem | nn.Module | tuple):
        refused = [f"`--model-arg {name}`" for name in spec.model_args]
        refused += [f"`--{name.replace('_', '-')}`" for name in _options(spec) if name != "batch_size"]
        if refused:
            raise ProblemError(
                f"`{spec.model}` is an existing object and cannot use {', '.join(refused)}; name a function"
            )
        return factory
    if not callable(factory):
        raise ProblemError(f"`{spec.model}` is {kind_of_value(factory)}, not a factory; {_EXPECTED}")
    return call_factory(factory, spec.model, spec.model_args, _options(spec), own=False)


def _options(spec: Spec) -> dict[str, Any]:
    """The options that were given and that a factory may have a parameter for."""
    options = {name: getattr(spec, name) for name in ("batch_size", "data", "pretrained")}
    if spec.ignore_index != type(spec).ignore_index:
        options["ignore_index"] = spec.ignore_index
    return {name: value for name, value in options.items() if value is not None}


_EXPECTED = "a factory returns a gaverify.Problem, a tuple (model, loss, batch) or a torch.nn.Module"


def _problem(built: Any, spec: Spec) -> Problem:
    """Returns a problem for each thing that a factory may return."""
    name = spec.model
    described = spec.input_shape is not None or spec.loss is not None  # else one of transformers gets a random batch
    if isinstance(built, nn.Module) and not (
        has_training_step(built) or (speaks_transformers(built) and not described)
    ):
        return bare_problem(
            built, name, spec.input_shape, spec.loss, spec.classes, spec.batch_size or DEFAULT_BATCH_SIZE
        )
    _check_bare_options(spec, "brings its own batch and loss")
    if isinstance(built, nn.Module):
        built = _of_module(built, spec)
    elif isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module):
        built = _of_pair(*built, name)
    if isinstance(built, tuple):
        if len(built) != 3:
            raise ProblemError(f"`{name}` returned a tuple of {len(built)}; return (model, loss, batch)")
        built = Problem(*built)
    if not isinstance(built, Problem):
        raise ProblemError(f"`{name}` returned {kind_of_value(built)}; {_advice(built)}{_EXPECTED}")
    if not isinstance(built.model, nn.Module):
        raise ProblemError(
            f"`{name}`: the model is {kind_of_value(built.model)}, not a torch.nn.Module; "
            "the order is (model, loss, batch)"
        )
    if not callable(built.loss):
        raise ProblemError(
            f"`{name}`: the loss is {kind_of_value(built.loss)}; "
            "write a function `loss(model, batch)` that returns a scalar"
        )
    return replace(built, loss=as_loss(built.loss), batch=first_batch(built.batch))


def _of_module(model: nn.Module, spec: Spec) -> Problem:
    """The problem of a module that says itself what its loss is."""
    if has_training_step(model):
        return Problem(model, training_step_loss(model, spec.model), training_batch(model, spec.model))
    size = spec.batch_size or DEFAULT_BATCH_SIZE
    return Problem(model, forward_loss, random_batch(model, spec.model, size), batch_size=size)


def _of_pair(model: nn.Module, batch: Any, name: str) -> Problem | tuple[Any, ...]:
    """The problem of (model, batch) where the model says itself what its loss is; the pair where it does not."""
    if has_training_step(model):
        return Problem(model, training_step_loss(model, name), first_batch(batch))
    batch = first_batch(batch)
    return Problem(model, forward_loss, batch) if isinstance(batch, Mapping) else (model, batch)


def _advice(built: Any) -> str:
    """What is probably meant by something that is no problem."""
    if built is None:
        return "is its `return` missing? "
    if isinstance(built, type) and issubclass(built, nn.Module):
        return f"return an object of it, `{built.__name__}()`; "
    if hasattr(built, "__iter__") and hasattr(built, "dataset"):
        return "a loader is accepted in place of the batch: return (model, loss, loader); "
    if isinstance(built, Mapping):
        return "return gaverify.Problem(model=…, loss=…, batch=…); "
    return ""


def _problem_of_pretrained(spec: Spec) -> Problem:
    _check_bare_options(spec, "is loaded by transformers, with a batch of its own")
    refused = [f"--model-arg {name}" for name in spec.model_args]
    refused += [f"--{name}" for name in _options(spec) if name not in ("batch_size", "ignore_index")]
    if refused:
        raise ProblemError(
            f"`{spec.model}` is loaded by transformers and cannot use {', '.join(refused)}; name your own factory"
        )
    return _of_module(load_pretrained(spec.model), spec)


def _check_bare_options(spec: Spec, reason: str) -> None:
    """Raises for options that only a bare module has a use for, rather than to ignore them."""
    values = {"--input-shape": spec.input_shape, "--loss": spec.loss, "--classes": spec.classes}
    refused = [option for option, value in values.items() if value is not None]
    if refused:
        raise ProblemError(
            f"`{spec.model}` {reason}; {', '.join(refused)} {'is' if len(refused) == 1 else 'are'} for a factory that "
            "returns only a torch.nn.Module: leave it out"
        )
