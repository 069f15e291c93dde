"""The pytest plugin: specs as test items, a fixture, and failures that read like the terminal's report.

pytest imports this module in every run of every project that has gaverify installed, so it imports nothing but pytest;
what verifies is imported when a spec or the fixture asks for it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gaverify.errors import SpecError
    from gaverify.records.verdict import Verdict
    from gaverify.spec import Spec
    from gaverify.spec.project import Project

_MARKERS = (
    "gaverify: a spec that gaverify verifies, or a test that uses its fixture",
    "gaverify_cpu: a spec that runs on the CPU, or wherever its model is",
    "gaverify_cuda: a spec that asks for a CUDA device",
    "gaverify_mps: a spec that asks for an Apple GPU",
    "gaverify_ranks: a spec that runs on several ranks",
    "gaverify_slow: a spec that took longer than 10 seconds the last time",
)
_SLOW = 10.0
_DURATIONS = "gaverify/durations"
_ACCEPTED = "gaverify accepted"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the switch that makes spec files tests, so that no project's TOML files are read unasked."""
    group = parser.getgroup("gaverify", "gradient accumulation")
    group.addoption(
        "--gaverify",
        action="store_true",
        default=False,
        help="collect gaverify's specs: `pytest --gaverify configs/` verifies each TOML spec of the folder",
    )
    group.addoption(
        "--gaverify-strict", action="store_true", default=False, help="a stale accepted divergence fails its spec"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers."""
    for line in _MARKERS:
        config.addinivalue_line("markers", line)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collects a TOML file that is a spec, or was named on the command line."""
    if file_path.suffix != ".toml" or not parent.config.getoption("--gaverify"):
        return None
    from gaverify.spec import is_meant_as_spec

    if not parent.session.isinitpath(file_path) and not is_meant_as_spec(file_path):
        return None
    return SpecFile.from_parent(parent, path=file_path)


def _project(file: Path) -> Project | None:
    """Returns the project's settings; None where they are wrong, which each spec tells when it is verified."""
    from gaverify.errors import SpecError
    from gaverify.spec.project import project_settings

    try:
        return project_settings(file.parent)
    except SpecError:
        return None


class SpecFile(pytest.File):
    """A TOML file with one spec."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yields its one item; what is wrong with the spec is the item's error, so that the others still run."""
        from gaverify.spec import read_specs

        for _, entry in read_specs([self.path], project=_project(self.path)):
            yield SpecItem.from_parent(self, name="gaverify", entry=entry)


class SpecItem(pytest.Item):
    """One spec: passes where `gaverify run` leaves with 0, fails on a divergence; anything undecided is an error."""

    verdict: Verdict

    def __init__(self, *, entry: Spec | SpecError, **options: Any) -> None:
        super().__init__(**options)
        self.entry = entry
        self.add_marker("gaverify")
        device = str(getattr(entry, "device", None) or "cpu").partition(":")[0]
        self.add_marker(f"gaverify_{device if device in ('cuda', 'mps') else 'cpu'}")
        if (getattr(entry, "ranks", None) or 1) > 1:
            self.add_marker("gaverify_ranks")
        if _durations(self.config).get(self.nodeid, 0.0) > _SLOW:
            self.add_marker("gaverify_slow")

    def setup(self) -> None:
        """Verifies. pytest calls what goes wrong here an error, not a failure: nothing was found about the model."""
        from gaverify.cli.streams import guard_process
        from gaverify.errors import GaverifyError, MissingPackage, SpecError, as_foreseen

        spec_path = self.nodeid.partition("::")[0]
        if isinstance(self.entry, SpecError):
            pytest.fail(str(self.entry).replace(f"{self.path}: ", f"{spec_path}: "), pytrace=False)
        failure = lacks = ""
        try:
            with guard_process():
                self.verdict = self._verify_item(self.entry)
        except (GaverifyError, SystemExit) as error:
            failure = str(as_foreseen(error))
            named = self.session.isinitpath(self.path) or self.config.getoption("--gaverify-strict")
            lacks = failure if isinstance(error, MissingPackage) and not named else ""
        if lacks:
            pytest.skip(f"{spec_path}: {lacks}")
        if failure:  # not inside the `except`: pytest would print the whole chain of exceptions
            pytest.fail(f"{spec_path}: {failure}", pytrace=False)
        if self.verdict.exit_code not in (0, 1):
            raise _Judged(self.verdict)

    def _verify_item(self, spec: Spec) -> Verdict:
        from dataclasses import replace

        from gaverify.acceptance import mark_accepted
        from gaverify.cli.workers import needs_worker, verify_in_worker
        from gaverify.spec.project import project_settings
        from gaverify.verification import verify_spec

        verdict = verify_spec(spec) if not needs_worker(spec) else verify_in_worker(spec)
        verdict = replace(verdict, source=self.nodeid.partition("::")[0])
        strict = bool(self.config.getoption("--gaverify-strict"))
        return mark_accepted(
            verdict, spec.accept, project_settings(self.path.parent), expect=spec.expect, strict=strict
        )

    def runtest(self) -> None:
        """Passes or raises, by the verdict's exit code."""
        if self.verdict.exit_code:
            raise _Judged(self.verdict)
        for sentence in _remarks(self.verdict):
            self.user_properties.append((_ACCEPTED, sentence))

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the item stands, for pytest's headings."""
        return self.path, None, f"gaverify {self.nodeid.partition('::')[0]}"


class _Judged(Exception):
    """Carries a verdict that is no success to the hooks that show it."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.outcome.value)
        self.verdict = verdict


def _make_report_text(verdict: Verdict, path: Path | str = "", line: int = 1) -> Any:
    from gaverify.report.text import ReportText  # not above: most runs of pytest fail without us

    return ReportText(verdict, str(path), line)


def _remarks(verdict: Verdict) -> Iterator[str]:
    for finding in verdict.findings:
        if finding.accepted:
            place = f" at {finding.location}" if finding.location and str(finding.location) else ""
            yield f"{finding.code} {finding.name}{place}: {finding.accepted}"
    yield from verdict.acceptance.stale


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows the report of a failed `assert_equivalent` in colour, under the line of the test that called it."""
    report = yield
    verdict = getattr(call.excinfo.value, "gaverify_verdict", None) if call.excinfo is not None else None
    if verdict is not None and report.failed and call.excinfo is not None:
        entry = next((e for e in reversed(call.excinfo.traceback) if e.path == item.path), call.excinfo.traceback[-1])
        report.longrepr = _make_report_text(verdict, entry.path, entry.lineno + 1)  # type: ignore[assignment]
        report.sections.insert(0, ("called at", f"{entry.path}:{entry.lineno + 1}"))
    if isinstance(item, SpecItem) and call.excinfo is not None and isinstance(call.excinfo.value, _Judged):
        # the report in place of a traceback through pytest's and gaverify's own code
        report.longrepr = _make_report_text(call.excinfo.value.verdict, item.path)  # type: ignore[assignment]
    if isinstance(item, SpecItem) and call.when == "setup":
        item.config.stash.setdefault(_TIMES, {})[item.nodeid] = call.duration
    return report


_TIMES: pytest.StashKey[dict[str, float]] = pytest.StashKey()


def _durations(config: pytest.Config) -> dict[str, float]:
    cache = getattr(config, "cache", None)  # `-p no:cacheprovider`
    durations = cache.get(_DURATIONS, {}) if cache is not None else {}
    return durations if isinstance(durations, dict) else {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remembers how long the specs took, for the marker of slow ones."""
    taken = session.config.stash.get(_TIMES, {})
    cache = getattr(session.config, "cache", None)
    if taken and cache is not None:
        cache.set(_DURATIONS, _durations(session.config) | taken)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names the accepted divergences: a test that passes although gradients differ must not go unseen."""
    sentences = [
        f"{report.nodeid.partition('::')[0]}: {sentence}"
        for report in terminalreporter.stats.get("passed", ())
        for name, sentence in report.user_properties
        if name == _ACCEPTED
    ]
    if sentences:
        terminalreporter.section("gaverify: accepted divergences", yellow=True)
        for line in sentences:
            terminalreporter.line(line)


@pytest.fixture(name="gaverify")
def gaverify_fixture(request: pytest.FixtureRequest) -> ModuleType:
    """The package, to verify models in tests: `gaverify.assert_equivalent(model, loss, batch, steps=4)`."""
    import gaverify

    request.node.add_marker("gaverify")
    return gaverify
