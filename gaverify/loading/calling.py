"""Calls a factory with the arguments that it accepts, and says which it does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gaverify.errors import GaverifyError, ProblemError, SpecError, exit_call, is_out_of_memory, nearest
from gaverify.loading.importing import described, raised_at

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
    problems += [_unused(option, name) for option in options if option not in accepted and option != "batch_size"]
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
            raise ProblemError(f"`{name}` left Python with {exit_call(error)}{raised_at(error)}") from error
        raise ProblemError(f"`{name}` raised {described(error)}") from error


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


def _unused(option: str, name: str) -> str:
    word = option.replace("_", "-")
    return f"--{word}: `{name}` has no parameter `{option}` that could take it; leave it out"
