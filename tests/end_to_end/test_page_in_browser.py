"""The page in a real browser: opened, sorted, filtered, walked through by keyboard and photographed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import browser
import profiles
import pytest
import samples

from gaverify.records.outcomes import Outcome
from gaverify.report import render

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browser.found() is None, reason="no chromium"),
    pytest.mark.skipif(importlib.util.find_spec("websocket") is None, reason="websocket-client is not installed"),
]

SHOWN = "Array.from(document.querySelectorAll('#t1-1 tbody tr')).filter(row => row.offsetHeight > 0)"
NAMES = f"{SHOWN}.map(row => row.cells[0].textContent)"


@pytest.fixture(scope="module")
def page() -> Iterator[browser.Page]:
    with browser.browsing() as opened:
        yield opened


def opened(page: browser.Page, folder: Path, answers: object, **options: object) -> Path:
    file = folder / "page.html"
    file.write_text(render(answers, "html"), encoding="utf-8")  # type: ignore[arg-type]
    page.requests.clear()
    page.problems.clear()
    page.open(file, **options)  # type: ignore[arg-type]
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("sample", [samples.divergent, samples.patched, profiles.profile, samples.inconclusive])
def test_it_opens_alone_and_fits(page: browser.Page, tmp_path: Path, sample, scheme: str, width: int) -> None:
    file = opened(page, tmp_path, [sample()], width=width, scheme=scheme)
    assert page.problems == []
    assert {url for url in page.requests if not url.startswith("about:")} == {file.as_uri()}
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(13, 17, 23)")
    picture = tmp_path / "page.png"
    page.photograph(picture)
    assert picture.stat().st_size > 10_000


def test_a_diff_is_copied_as_it_stands(page: browser.Page, tmp_path: Path) -> None:
    answer = samples.patched()
    assert answer.patch is not None
    opened(page, tmp_path, [answer])
    assert page.evaluate("document.querySelector('.diff').textContent") == answer.patch.diff
    # Lines below each other, the long one scrolled inside its box
    assert page.evaluate("new Set([...document.querySelectorAll('.diff code')].map(line => line.offsetTop)).size") == 7
    colour = "getComputedStyle(document.querySelector('.diff .{}')).color"
    assert page.evaluate(colour.format("added")) != page.evaluate(colour.format("removed"))


def test_tables_sort_and_filter(page: browser.Page, tmp_path: Path) -> None:
    opened(page, tmp_path, [samples.divergent()])
    assert page.evaluate(NAMES)[0] == "0.weight"
    click = "document.querySelectorAll('#t1-1 th button')[{}].click()"
    page.evaluate(click.format(0))
    assert page.evaluate(NAMES) == sorted(page.evaluate(NAMES))
    page.evaluate(click.format(0))
    assert page.evaluate(NAMES) == sorted(page.evaluate(NAMES), reverse=True)
    page.evaluate(click.format(3))
    sizes = [float(size.rstrip("*")) for size in page.evaluate(f"{SHOWN}.map(row => row.cells[3].textContent)")]
    assert sizes == sorted(sizes)
    assert page.evaluate("document.querySelectorAll('#t1-1 th')[3].getAttribute('aria-sort')") == "ascending"
    page.evaluate(
        "(() => { const s = document.getElementById('t1-1-outcome'); s.value = 'divergent';"
        "s.dispatchEvent(new Event('input')) })()"
    )
    assert len(page.evaluate(NAMES)) == 3
    page.evaluate("document.getElementById('t1-1-filter').focus()")
    page.call("Input.insertText", text="BIAS")
    assert page.evaluate(NAMES) == ["0.bias"]
    assert page.evaluate("document.querySelector('[data-counts=t1-1]').textContent") == "1 of 6 rows"


def test_it_works_by_keyboard(page: browser.Page, tmp_path: Path) -> None:
    opened(page, tmp_path, [samples.divergent()])
    reached = []
    for _ in range(30):
        page.press("Tab", 9)
        reached.append(page.evaluate("document.activeElement.textContent.trim().slice(0, 20)"))
        if reached[-1] == "parameter":
            page.press("Enter", 13, "\r")
            break
    assert reached[0] == "Skip to the result" and reached[-1] == "parameter"
    assert page.evaluate("document.querySelector('#t1-1 th').getAttribute('aria-sort')") == "ascending"


def test_everything_has_a_name_for_a_screen_reader(page: browser.Page, tmp_path: Path) -> None:
    opened(page, tmp_path, [samples.divergent(), samples.audited(), profiles.profile()])
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    for role in ("button", "searchbox", "combobox", "table", "region", "main", "columnheader"):
        named = [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") == role]
        assert named or role == "columnheader", role
        assert all(named) or role == "main", role
    labels = page.evaluate("Array.from(document.querySelectorAll('.chart')).map(chart => chart.ariaLabel)")
    assert labels and all(labels)
    assert page.evaluate("document.documentElement.lang") == "en"


def test_a_script_in_a_name_does_not_run(page: browser.Page, tmp_path: Path) -> None:
    name = "<img src=x onerror='document.title=1'><script>document.title = 'run'</script>"
    opened(page, tmp_path, [samples.divergent(parameters=(samples.row(name, Outcome.DIVERGENT),), source=name)])
    assert page.evaluate("document.title").startswith("gaverify: divergent, <img")
    assert page.evaluate(NAMES) == [name]
    assert page.evaluate("document.images.length") == 0


def test_five_thousand_parameters(page: browser.Page, tmp_path: Path) -> None:
    opened(page, tmp_path, [samples.large(7, 5000)])
    assert len(page.evaluate(NAMES)) == 250
    page.evaluate("document.querySelector('[data-all]').click()")
    assert len(page.evaluate(NAMES)) == 5000
    page.evaluate("document.querySelector('[data-all]').click()")
    page.evaluate(
        "(() => { const f = document.getElementById('t1-1-filter'); f.value = 'layers.4999.';"
        "f.dispatchEvent(new Event('input')) })()"
    )
    assert len(page.evaluate(NAMES)) == 1  # it is found although it was not drawn
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.evaluate("document.querySelector('.tools').offsetHeight") == 0
    page.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize("sample", [samples.divergent, samples.large, samples.audited, profiles.profile])
def test_a_printed_table_fits_and_breaks_no_number(page: browser.Page, tmp_path: Path, sample) -> None:
    """On paper nothing scrolls: 718 px are A4 with the margins of Chromium."""
    opened(page, tmp_path, [sample()], width=718)
    page.call("Emulation.setEmulatedMedia", media="print")
    wide = "Array.from(document.querySelectorAll('table')).map(t => t.getBoundingClientRect().right)"
    assert max(page.evaluate(wide)) <= 718
    rectangles = (
        "Array.from(document.querySelectorAll('tbody tr:not(.later) td:nth-child(3)')).map(cell => {"
        "const range = document.createRange(); range.selectNodeContents(cell); return range.getClientRects().length })"
    )
    assert max(page.evaluate(rectangles)) == 1  # one for each line of the text
    page.call("Emulation.setEmulatedMedia", media="")
