"""A profile in each of its formats: on a stream as text, or as the contents of a file."""

from __future__ import annotations

from typing import IO

from gaverify.profiling.records import Profile
from gaverify.report import _layout, _print
from gaverify.report.layout import Layout, plain


def print_profile(profile: Profile, stream: IO[str]) -> None:
    """Prints the report: coloured on a terminal, plain on a pipe or under `NO_COLOR`, ASCII where needed."""
    from gaverify.profiling.table import profile_lines

    layout = _layout(stream)
    _print(profile_lines(profile, layout), layout, stream)


def render_profile(profile: Profile, form: str) -> str:
    """Returns the profile as "text", "json" or "svg"."""
    if form == "json":
        from gaverify.profiling.document import profile_document

        return profile_document(profile) + "\n"
    if form == "svg":
        from gaverify.profiling.plot import profile_svg

        return profile_svg(profile)
    from gaverify.profiling.table import profile_lines

    return plain(profile_lines(profile, Layout()))
