"""The verdict card: an answer as one SVG picture that needs nothing else, with a chart of its parameters."""

from __future__ import annotations

import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

from gaverify.report.blocks import Chart, Page
from gaverify.report.charts import parameters_chart
from gaverify.report.layout import clean
from gaverify.report.pages import Report, page_of

_WIDTH, _MARGIN = 860, 24
_COLUMNS = 112
"""Characters of a line: 12 pixels of a monospaced font are 7.2 wide."""
_LINE, _BAR = 18, 20
_BARS_LEFT, _BARS_WIDE = 290, 420
_MOST_BARS = 12
_MOST_FINDINGS = 4


def svg(report: Report) -> str:
    """Returns the picture: a card for each answer and error, one below the other."""
    card = _Card()
    for run in report.list_runs([page_of(answer) for answer in report.answers]):
        if isinstance(run, Page):
            card.add_page(run)
            continue
        card.add_heading("divergent" if run.word == "error" else "inconclusive", run.word.upper(), run.source)
        for message in run.messages:
            card.add_text(message)
    return card.text()


class _Card:
    """Elements of a picture that grows downwards; `y` is where the next line begins, in pixels."""

    def __init__(self) -> None:
        self.y = 16.0
        self.elements: list[str] = []

    def add_page(self, page: Page) -> None:
        """Adds the outcome, its causes, the chart and what was run."""
        headline = page.headline
        self.add_heading(headline.outcome.value, headline.words.upper(), headline.title)
        self.add_text(headline.sentence, "strong")
        self.add_text(headline.method, "soft")
        for remark in headline.remarks:
            self.add_text(remark)
        self.y += 8
        for block in page.findings[:_MOST_FINDINGS]:
            finding = block.finding
            self.add_text(f"{finding.code} {finding.name} ({block.kind})", "strong")
            self.add_text(block.summary, indent=2)
            if finding.remedy:
                self.add_text(f"remedy: {finding.remedy}", indent=2)
            self.y += 6
        left_out = len(page.findings) - _MOST_FINDINGS
        if left_out > 0:
            self.add_text(f"{left_out} more in the text report", "soft")
        for table in page.comparisons[:1]:
            caption = "Relative difference of each parameter (logarithmic; | is the allowed difference)"
            self._add_chart(parameters_chart(table.rows), caption)
        if page.profile_rows:
            for chart in (block for block in page.blocks if isinstance(block, Chart)):
                self._add_chart(chart, chart.caption)
        for label, text in page.facts.rows:
            self.add_text(f"{label:<12}{text}", "soft", hanging=12)
        self.y += 16

    def add_heading(self, kind: str, outcome: str, title: str) -> None:
        """Adds a coloured stripe with the outcome and what it is of."""
        self.elements.append(f'<rect class="{kind}" x="0" y="{self.y:.0f}" width="6" height="26"/>')
        self._add_line(outcome, f"outcome {kind}", _MARGIN)
        self._add_line(title, "title", _MARGIN + 12 + 9 * len(outcome))
        self.y += 28

    def add_text(self, text: str, kind: str = "", indent: int = 0, hanging: int = 0) -> None:
        """Adds a paragraph; nothing for an empty one."""
        lines = textwrap.wrap(clean(text), _COLUMNS - indent, subsequent_indent=" " * hanging, drop_whitespace=True)
        for line in lines:
            self._add_line(line, kind, _MARGIN + 7.2 * indent)
            self.y += _LINE

    def _add_line(self, text: str, kind: str, x: float) -> None:
        escaped_text = escape(clean(text))
        self.elements.append(
            f'<text class="{kind}" x="{x:.0f}" y="{self.y + 17:.0f}" xml:space="preserve">{escaped_text}</text>'
        )

    def _add_chart(self, chart: Chart, caption: str) -> None:
        """Adds the bars of a chart with their axis."""
        if not chart:
            return
        self.add_text(caption, "soft")
        for bar in chart.bars[:_MOST_BARS]:
            # the end of a path tells more than its beginning
            name = bar.name if len(bar.name) <= 36 else "…" + bar.name[-35:]
            self._add_line(name, "", _MARGIN)
            # a bar of no length could not be seen
            y, long = self.y + 5, max(bar.percent * _BARS_WIDE / 100, 2)
            place = f'x="{_BARS_LEFT}" y="{y:.0f}" width="{long:.1f}" height="13"'
            self.elements.append(f'<rect class="{bar.kind}" {place}/>')
            if bar.allowed is not None:
                x = _BARS_LEFT + bar.allowed * _BARS_WIDE / 100
                self.elements.append(f'<path class="allowed" d="M{x:.1f} {y - 2:.0f}v17"/>')
            self._add_line(bar.size, "soft", _BARS_LEFT + _BARS_WIDE + 12)
            self.y += _BAR
        for percent, text in chart.ticks:
            self._add_line(text, "soft", _BARS_LEFT + percent * _BARS_WIDE / 100 - 12)
        self.y += _BAR
        left_out = chart.bars_left_out + max(0, len(chart.bars) - _MOST_BARS)
        if left_out:
            self.add_text(f"{left_out:,} more in the text report", "soft")
        self.y += 6

    def text(self) -> str:
        """Returns the picture."""
        high = f"{self.y:.0f}"
        style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {high}" role="img" class="card">',
            f"<title>gaverify</title><style>\n{style}</style>",
            f'<rect class="back" width="{_WIDTH}" height="{high}"/>',
        ]
        return "\n".join([*head, *self.elements, "</svg>\n"])
