"""The command line: parse, call, print, exit.

`gaverify --help` imports click and nothing heavier; each command imports what it needs when it runs. A new command is
a function in a file of its own, and a name in `COMMANDS`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import add_completion_class

from gaverify.children.launching import received
from gaverify.cli.accepting import baseline
from gaverify.cli.auditing import audit
from gaverify.cli.listing import doctor, explain, models, rules, schema
from gaverify.cli.options import ColonComplete
from gaverify.cli.profiling import profile
from gaverify.cli.running import run
from gaverify.cli.scaffolding import init
from gaverify.cli.showing import debug_option, report
from gaverify.cli.streams import (
    Invocation,
    ignore_missing_numpy,
    interrupts_noted,
    open_closed_streams,
    report_failure,
    silence,
)
from gaverify.errors import INTERRUPTED, nearest

add_completion_class(ColonComplete, "bash")

COMMANDS: tuple[click.Command, ...] = (
    run,
    audit,
    profile,
    report,
    baseline,
    models,
    rules,
    explain,
    schema,
    init,
    doctor,
)
_OTHER_WORDS = {"check": "run", "verify": "run", "test": "run", "compare": "run", "new": "init", "list": "models"}
"""Names that other tools give a command, where the spelling is not alike."""
BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended


class _Commands(click.Group):
    """A group that lists its commands in the order of `COMMANDS` and names the nearest one for a typing mistake."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-"):
            near = _OTHER_WORDS.get(args[0], "") or nearest(args[0], self.commands)
            command_names = ", ".join(self.commands)
            advice = f"did you mean `{near}`?" if near else f"the commands are {command_names}"
            ctx.fail(f"there is no command `{args[0]}`; {advice}")
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    import platform

    from gaverify.version import __version__, installed_version

    click.echo(f"gaverify {__version__} (torch {installed_version('torch')}, Python {platform.python_version()})")
    ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the versions and exit.",
)
@debug_option
def cli() -> None:
    """Checks, and proves where possible, that gradient accumulation computes the gradient of the full batch.

    Exit codes: 0 equivalent, 1 divergent, 2 an error in the options, a spec or your code, 3 inconclusive, 70 a bug in
    gaverify.
    """


for _command in COMMANDS:
    cli.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code; no exception leaves it, because Python would exit with 1.

    Args:
        argv: The words after the program's name; `None` takes those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Words after `--` belong to the audited script, its own `--debug` too.
    own_words = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in own_words or os.environ.get("GAVERIFY_DEBUG", "") not in ("", "0")
    invocation = Invocation(tuple(words), debug)
    received.clear()
    open_closed_streams()
    # names and messages hold characters such as × that a terminal without Unicode cannot show
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    ignore_missing_numpy()
    try:
        with interrupts_noted():
            code = _run(words, invocation)
        sys.stdout.flush()
        return _code_of_signal(code)
    except BrokenPipeError:
        silence(sys.stdout)
        return BROKEN_PIPE
    except BaseException as error:
        if isinstance(error, OSError):
            silence(sys.stdout)  # a full disk behind it: what is left in its buffer would fail again on exit
        return _code_of_signal(report_failure(error, invocation))
    finally:
        if argv is None:
            gc.freeze()  # out of the collector's sight: the process is gaverify's own, and ends


def _code_of_signal(code: int) -> int:
    """Returns what shells expect of a program that SIGTERM or SIGHUP has ended, which Ctrl-C's code would hide."""
    return 128 + received[-1] if code == INTERRUPTED and received else code


def _run(words: list[str], invocation: Invocation) -> int:
    """Parses and runs; click's own `main` leaves with 1 when a reader of stdout left, which would read as divergent."""
    if "_GAVERIFY_COMPLETE" in os.environ:  # a shell that completes words; leaves with SystemExit
        try:
            cli.main(args=words, prog_name="gaverify")
        except SystemExit as done:
            return done.code if isinstance(done.code, int) else 0
    try:
        with cli.make_context("gaverify", words, obj=invocation) as context:
            code = cli.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.NoSuchOption as error:
        # click lists every option that is a little alike, `--help` for `--step`, too
        near = nearest(error.option_name, error.possibilities or ())
        raise click.NoSuchOption(error.option_name, possibilities=[near] if near else None, ctx=error.ctx) from error
    return code if isinstance(code, int) else 0
