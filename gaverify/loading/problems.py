"""Builds the problem that a spec names: calls the factory with the arguments it accepts."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
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
from gaverify.loading.bare import (
    DEFAULT_BATCH_SIZE,
    as_loss,
    bare_problem,
    first_batch,
    forward_loss,
    has_training_step,
    training_batch,
    training_step_loss,
)
from gaverify.loading.importing import NameKind, describe_error, import_factory, kind_of, missing_package, raised_at
from gaverify.passes.batching import Problem
from gaverify.passes.isolation import isolated_generators
from gaverify.passes.modes import mode_set
from gaverify.zoo import at_least, find_builtin

if TYPE_CHECKING:
    from gaverify.spec import Spec


# A model that `transformers` can load, from a folder or the hub, on a random batch that fits its configuration.
#
# Shapes: B samples, T tokens.


_TOKENS = 32
"""T: enough for rows of clearly different length, short enough for a first look at a large model."""

_IGNORED = -100  # what the losses of `transformers` leave out

Batch = dict[str, torch.Tensor]


def speaks_transformers(model: nn.Module) -> bool:
    """Whether a module has what a random batch is made from: a configuration and the name of its main input."""
    return hasattr(model, "main_input_name") and hasattr(getattr(model, "config", None), "to_dict")


def random_batch(model: nn.Module, name: str, batch_size: int) -> Batch:
    """Returns a batch with labels for which the model returns a loss; rows of text have different lengths.

    Raises:
        ProblemError: No kind of label gives a loss.
    """
    inputs = _inputs(model, batch_size)
    said = ""
    with mode_set([model], "eval"), torch.no_grad():
        for labels in _labels(model, inputs, batch_size):
            try:
                loss = getattr(model(**inputs, **labels), "loss", None)
            except Exception as error:  # labels of the wrong kind; the next kind may fit
                said = said or f" ({type(error).__name__}: {str(error).strip().splitlines()[0][:120]})"
                continue
            if isinstance(loss, torch.Tensor) and loss.numel() == 1 and bool(torch.isfinite(loss)):
                return inputs | labels
    raise ProblemError(
        f"`{name}`: {type(model).__name__} returns no loss for random `{', '.join(inputs)}` and labels{said}; "
        f"write a factory with a batch of your own: `gaverify init --model {name}`"
    )


def load_pretrained(name: str) -> Any:
    """Returns the model of a folder that `save_pretrained` wrote, or of a name on the hub.

    A folder with a configuration and no weights gives a model with random ones.

    Raises:
        ProblemError: `transformers` is missing, or cannot load it.
    """
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        what = "is a folder" if Path(name).is_dir() else "is a name on the hub"
        raise MissingPackage(
            f"`{name}` {what} for `transformers`, which cannot be imported; run `pip install transformers`"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:
        raise ProblemError(
            f"`{name}`: transformers cannot load it: {type(error).__name__}: {str(error).strip().splitlines()[0]}; "
            "give a folder that `save_pretrained` wrote, a name on the hub, or `file.py:factory`"
        ) from error
    architecture = next(iter(getattr(config, "architectures", None) or ()), "")
    kind = getattr(transformers, architecture, None)
    if kind is None:
        raise ProblemError(
            f"`{name}`: its config.json names {f'the class `{architecture}`' if architecture else 'no class'} that "
            f"transformers has; write a factory: `gaverify init --model {name}`"
        )
    try:
        return kind.from_pretrained(name) if _has_weights(Path(name)) else kind(config)
    except Exception as error:
        raise ProblemError(f"`{name}`: {architecture} cannot be built: {type(error).__name__}: {error}") from error


def _has_weights(folder: Path) -> bool:
    return not folder.is_dir() or any(entry.suffix in (".safetensors", ".bin") for entry in folder.iterdir())


def _inputs(model: Any, batch_size: int) -> Batch:
    config = model.config
    main = str(model.main_input_name)
    if main == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, tuple | list) else (size, size)
        return {main: torch.randn(batch_size, getattr(config, "num_channels", 3), height, width)}
    if main == "input_values":
        return {main: torch.randn(batch_size, 8000)}  # half a second of sound
    if main == "input_features":
        return {main: torch.randn(batch_size, config.num_mel_bins, 2 * config.max_source_positions)}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    lengths = torch.linspace(longest, max(2, longest // 4), batch_size).long().unsqueeze(1)
    real = torch.arange(longest) < lengths
    padding = getattr(text, "pad_token_id", None) or 0
    tokens = torch.randint(1, text.vocab_size, (batch_size, longest)).masked_fill(~real, padding)
    return {"input_ids": tokens, "attention_mask": real.long()}


def _labels(model: Any, inputs: Batch, batch_size: int) -> Iterator[Batch]:
    """Yields labels of each kind that heads of `transformers` take, those of the richest head first."""
    classes = int(getattr(model.config, "num_labels", 2) or 2)
    tokens = inputs.get("input_ids")
    if tokens is not None:
        real = inputs["attention_mask"].bool()
        yield {"labels": tokens.masked_fill(~real, _IGNORED)}
        yield {"labels": torch.randint(classes, tokens.shape).masked_fill(~real, _IGNORED)}
    yield {"labels": torch.randint(classes, (batch_size,))}
    yield {"labels": torch.rand(batch_size, classes)}
    if tokens is not None:
        yield {"start_positions": torch.zeros(batch_size).long(), "end_positions": torch.ones(batch_size).long()}
    yield {"labels": torch.randint(1, 5, (batch_size, 6))}  # letters of what is spoken
    yield {}


# Builds the problem that a spec names: calls the factory with the arguments it accepts, checks what it returns.


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def call_factory(
    factory: Callable[..., Any], name: str, arguments: Mapping[str, Any], options: Mapping[str, Any], *, own: bool
) -> Any:
    """Returns what the factory returns.

    Args:
        factory: A function or a class.
        name: The value of `--model`.
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
        f"--{option.replace('_', '-')}: `{name}` has no parameter `{option}` for it; leave it out"
        for option in options
        if option not in accepted and option != "batch_size"
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
        if kind is NameKind.BUILTIN:
            problem = _builtin(spec)
        elif kind is NameKind.TRANSFORMERS:
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
    """Returns what the factory returns; an object that is built already comes back as it is."""
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
    """Guesses what is meant by something that is no problem; a clause that ends in "; "."""
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
