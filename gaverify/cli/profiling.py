"""`gaverify profile`: memory and time against K, beside the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gaverify.cli.options import add_options, complete_specs, names_a_model
from gaverify.cli.showing import output_options, show
from gaverify.cli.streams import DelayedProgress, tell
from gaverify.errors import INTERRUPTED, SpecError
from gaverify.records.profile import OPTIMIZERS, STRATEGIES, Strategy, plans
from gaverify.spec import OPTIONS, Spec, load_specs, parse_spec
from gaverify.spec.options import option, options_of, pop_values, read_words
from gaverify.spec.values import FLAG, one_of, several_of, sizes, whole

if TYPE_CHECKING:
    from gaverify.profiling import Profile

_OTHERWISE = (
    *("steps", "strategy", "lr", "reference", "expect", "ranks", "engine", "timeout"),
    *(name for name, each in OPTIONS.items() if each.kind is FLAG),
)
"""Options of a run that mean something else here, or nothing: what the full batch costs is what is measured."""


@dataclass(frozen=True)
class Measurements:
    """The measurements of a profile."""

    steps: tuple[int, ...] = option(
        sizes("whole numbers of at least 1", "K,K,…"),
        "K, micro-batches per optimizer step.  [1,2,4,8]",
        (1, 2, 4, 8),
    )
    """Every K."""
    strategy: tuple[Strategy, ...] = option(
        several_of(*STRATEGIES), "What to measure; repeatable, or separated by commas.  [all three]", STRATEGIES
    )
    """The ways through a batch."""
    repeats: int = option(whole(1, "N"), "Timed updates, after warm-up.  [10]", 10)
    """Updates whose time is taken."""
    optimizer: str | None = option(
        one_of(*OPTIMIZERS), "Include a step of this optimizer in every update.  [no step]", None, "sgd"
    )
    """Optimizer whose step belongs to every update; None: no step."""


_MEASUREMENTS = options_of(Measurements)
_SPEC_OPTIONS = {name: each for name, each in OPTIONS.items() if name not in _OTHERWISE}


@click.command(short_help="Measure memory and time of accumulation.")
@click.argument(
    "spec_file", metavar="[MODEL|SPEC]", required=False, type=click.Path(path_type=Path), shell_complete=complete_specs
)
@add_options([*_MEASUREMENTS.values(), *_SPEC_OPTIONS.values()])
@output_options
def profile(
    spec_file: Path | None,
    form: str,
    outputs: tuple[Path, ...],
    **words: Any,
) -> int:
    """Measures memory and time of accumulation, for a MODEL or a SPEC (a TOML file of options).

    Shows saved activations, peak memory and time of the full batch, of the summed loss and of accumulation, each
    measured in a fresh process. Also checks that their gradients agree.

    \b
      gaverify profile mnist-mlp --steps 1,2,4,8
      gaverify profile --model path/to/file.py:factory --device cuda
      gaverify profile --model mlp --output profile.html
    """
    if spec_file is not None and not words["model"] and names_a_model(spec_file):
        words["model"], spec_file = str(spec_file), None
    values = read_words({**_SPEC_OPTIONS, **_MEASUREMENTS}, words)
    problems: list[str] = []
    measurements = Measurements(**pop_values(_MEASUREMENTS, values, problems))
    # Found out now: a profile takes minutes, and its report would then have no place.
    problems += _output_problems(outputs)
    spec = _spec(spec_file, values, problems)
    measured_profile = _measure_profile(spec, measurements)
    measured_profile = replace(measured_profile, source=str(spec_file or ""))
    code = INTERRUPTED if measured_profile.interrupted else measured_profile.exit_code
    show([measured_profile], form, outputs, exit_code=code)
    if measured_profile.interrupted:
        tell("gaverify: interrupted; the report holds the rows that were done")
    return code


def _measure_profile(spec: Spec, measurements: Measurements) -> Profile:
    from gaverify.loading.importing import check_name
    from gaverify.profiling.launching import profile_spec

    check_name(spec.model)  # before a process imports torch: a name that does not exist is answered at once
    steps = tuple(sorted(set(measurements.steps)))
    with DelayedProgress(spec.model, unit="row") as progress:
        return profile_spec(
            spec,
            plans(measurements.strategy, steps),
            steps=steps,
            repeats=measurements.repeats,
            optimizer=measurements.optimizer,
            progress=progress.report,
        )


def _spec(file: Path | None, overrides: dict[str, Any], problems: Sequence[str]) -> Spec:
    """Returns the spec; raises one SpecError with the options' problems and the spec's own where there are any."""
    try:
        spec = _read_spec(file, overrides)
    except SpecError as error:
        if not problems:
            raise
        raise SpecError([*problems, *error.problems]) from error
    if problems:
        raise SpecError(problems)
    return spec


def _read_spec(file: Path | None, overrides: dict[str, Any]) -> Spec:
    """Returns the spec of the file or of the options.

    A profile has its own values of K and its own strategies, so those of the spec are not used. Weights that are listed
    one by one fit a single K and are refused.
    """
    if isinstance(overrides.get("weighting"), tuple):
        raise SpecError("--weighting: numbers fit one K only; write `uniform`, `samples`, `tokens` or `none`")
    if file is None:
        if "model" not in overrides:
            raise click.UsageError("nothing to profile: name a model (see `gaverify models`) or a spec file")
        return parse_spec({}, "command line", overrides)
    specs = load_specs([file], overrides)
    if len(specs) > 1:
        raise click.UsageError(f"`{file}` holds {len(specs)} specs; profile one at a time")
    spec = specs[0][1]
    if isinstance(spec.weighting, tuple):
        raise SpecError("$.weighting: numbers fit one K only; `--weighting uniform` overrides them", str(file))
    return spec


def _output_problems(outputs: Sequence[Path]) -> Sequence[str]:
    from gaverify.report import check_writable

    try:
        check_writable(outputs)
    except SpecError as error:
        return error.problems
    return ()
