"""`gaverify profile`: memory and time against K, beside the verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gaverify.cli.options import complete_specs, names_a_model, overrides_from, spec_options
from gaverify.cli.showing import output_options, show
from gaverify.cli.streams import DelayedProgress, tell
from gaverify.errors import INTERRUPTED, SpecError
from gaverify.spec import OPTIONS, Spec, load_specs, parse_spec
from gaverify.spec.values import FLAG

if TYPE_CHECKING:
    from gaverify.profiling import Profile
    from gaverify.records.profile import Strategy

_STEPS = "1,2,4,8"
_OPTIMIZERS = OPTIONS["optimizer"].kind
_OTHERWISE = (
    *("steps", "strategy", "optimizer", "lr", "reference", "expect", "ranks", "engine", "timeout"),
    *(name for name, option in OPTIONS.items() if option.kind is FLAG),
)
"""Options of a run that mean something else here, or nothing: what the full batch costs is what is measured."""


def _print_schema(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from gaverify.report.documents.schema import schema_text

    click.echo(schema_text("profile"))
    ctx.exit()


@click.command(short_help="Measure memory and time of accumulation.")
@click.argument(
    "spec_file", metavar="[MODEL|SPEC]", required=False, type=click.Path(path_type=Path), shell_complete=complete_specs
)
@click.option("--steps", metavar="K,K,…", default=_STEPS, help=f"K, micro-batches per optimizer step.  [{_STEPS}]")
@click.option(
    "--strategy",
    "strategies",
    metavar="full-batch|summed-loss|accumulate",
    multiple=True,
    help="What to measure; repeatable, or separated by commas.  [all three]",
)
@click.option("--repeats", metavar="N", default="10", help="Timed updates, after warm-up.  [10]")
@click.option(
    "--optimizer", metavar=_OPTIMIZERS.metavar, help="Include a step of this optimizer in every update.  [no step]"
)
@partial(spec_options, without=_OTHERWISE)
@output_options
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Print the JSON schema of --format json.",
)
def profile(
    spec_file: Path | None,
    steps: str,
    strategies: tuple[str, ...],
    repeats: str,
    optimizer: str | None,
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
      gaverify profile --model mlp --output plot.svg
    """
    if spec_file is not None and not words["model"] and names_a_model(spec_file):
        words["model"], spec_file = str(spec_file), None
    problems: list[str] = []
    ks = _numbers("--steps", steps, _STEPS, problems)
    count = _numbers("--repeats", repeats, "10", problems)
    chosen = _strategies(strategies, problems)
    if optimizer is not None and not _OPTIMIZERS.fits(optimizer):
        problems.append(f"--optimizer: unknown optimizer `{optimizer}`; write `sgd`, `adam` or `adamw`")
    if len(count) > 1:
        problems.append(f"--repeats: takes one number, got {len(count)}")
    # Found out now: a profile takes minutes, and its report would then have no place.
    problems += _output_problems(outputs)
    spec = _spec(spec_file, overrides_from(words), problems)
    measured_profile = _measure_profile(spec, chosen, ks, repeats=count[0], optimizer=optimizer)
    measured_profile = replace(measured_profile, source=str(spec_file or ""))
    code = INTERRUPTED if measured_profile.interrupted else measured_profile.exit_code
    show([measured_profile], form, outputs, exit_code=code)
    if measured_profile.interrupted:
        tell("gaverify: interrupted; the report holds the rows that were done")
    return code


def _measure_profile(spec: Spec, strategies: Sequence[Strategy], steps: Sequence[int], **options: Any) -> Profile:
    from gaverify.loading.importing import check_name
    from gaverify.profiling.launching import profile_spec
    from gaverify.records.profile import plans

    check_name(spec.model)  # before a process imports torch: a name that does not exist is answered at once
    with DelayedProgress(spec.model) as progress:
        return profile_spec(spec, plans(strategies, steps), steps=steps, progress=progress.report, **options)


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


def _numbers(option: str, word: str, example: str, problems: list[str]) -> tuple[int, ...]:
    parts = [part.strip() for part in word.split(",")]
    # Nine digits at most: no batch has more samples, and Python refuses to read numbers of thousands of digits.
    if not all(re.fullmatch(r"\d{1,9}", part) and int(part) > 0 for part in parts):
        problems.append(f"{option}: must be whole numbers of at least 1, got `{word}`; write `{option} {example}`")
        return ()
    return tuple(sorted({int(part) for part in parts}))


def _strategies(words: Sequence[str], problems: list[str]) -> tuple[Strategy, ...]:
    from gaverify.records.profile import STRATEGIES

    names = [part.strip() for word in words for part in word.split(",")]
    unknown = [word for word in names if word not in STRATEGIES]
    if unknown:
        strategy_names = ", ".join(f"`{name}`" for name in STRATEGIES)
        problems.append(
            f"--strategy: unknown strategy {', '.join(f'`{word}`' for word in unknown)}; known are {strategy_names}"
        )
    # In the order of the table, whatever the order of the words.
    return tuple(name for name in STRATEGIES if name in names or not names)


def _output_problems(outputs: Sequence[Path]) -> Sequence[str]:
    from gaverify.report import check_writable

    try:
        check_writable(outputs)
    except SpecError as error:
        return error.problems
    return ()
