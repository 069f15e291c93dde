"""`gaverify doctor`: whether gaverify's verdicts can be believed on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

import click

from gaverify.amounts import count_text
from gaverify.cli.options import completing
from gaverify.cli.progress import DelayedProgress
from gaverify.cli.streams import guests
from gaverify.errors import INTERNAL
from gaverify.spec.kinds import DEVICE

_MARKS = {True: "ok", False: "WRONG", None: ""}


@click.command(short_help="Check this machine with self-tests.")
@click.option(
    "--device",
    metavar=DEVICE.metavar,
    help="Device to test.  [one of each kind]",
    shell_complete=completing(DEVICE),
)
def doctor(device: str | None) -> int:
    """Prints versions and devices, and runs self-tests: right and wrong built-in models whose verdicts are known.

    Exit codes: 0 all tests passed, 2 there is no such device, 70 a test failed.
    """
    with guests():
        # Imports torch, which may print: inside `guests`, and not at the top, as `--help` must not wait for it.
        from gaverify import checkup

        lines = list(checkup.versions())
        devices = checkup.devices(device)
    wrong = _print(lines)
    for examined in devices:
        with guests():
            lines = list(checkup.support(examined))
        click.echo()
        wrong += _print(lines)
        for check in checkup.KNOWN:
            with guests(), DelayedProgress(str(check)):
                line = checkup.verify_builtin(check, examined)
            wrong += _print([line])
    click.echo()
    if wrong:
        click.echo(
            f"{count_text(wrong, 'check')} failed: do not trust verdicts on this machine, and report this output."
        )
        return INTERNAL
    click.echo("All checks passed: gaverify finds faults of these kinds on this machine.")
    return 0


def _print(lines: Iterable[tuple[str, str, bool | None]]) -> int:
    """Prints the lines and returns how many of them are wrong."""
    from gaverify.report.layout import Layout, plain

    layout = Layout(width=max(60, min(shutil.get_terminal_size((80, 24)).columns, 120)))
    wrong = 0
    for subject, answer, fine in lines:
        wrong += fine is False
        click.echo(plain(layout.wrap(answer, first=f"  {subject:<29}{_MARKS[fine]}", indent=38)), nl=False)
    return wrong
