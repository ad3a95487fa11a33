"""Markup in every value of every page, and in all that a page is made of: none of it becomes a tag, and nothing of it runs."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.comm import page as comm_page
from dsdoctor.hang.page import page_of as hang_page
from dsdoctor.hang.verdict import judge
from dsdoctor.overflow.trace.page import page_of as trace_page
from dsdoctor.ui.page import Page, Picture, rendered, write_page
from tests.comm.reports import bad_pair, missing_rank
from tests.each import each
from tests.hang.test_page import hanging
from tests.overflow.test_plot import drawn
from tests.overflow.written import frame, tensor
from tests.ui.test_pages_in_a_browser import PAGES

EVIL = (
    "<img src=x onerror='document.taint=1'></script><script>document.taint=1</script>\"'><svg/onload=document.taint=1>"
)
LINK = "<a href='javascript:document.taint=1'>x</a>${document.taint=1}{{7*7}}<!--"
TAGS = (
    " html head meta title style body header p b button main h1 h2 span div code a ul li pre i section details summary table thead "
    "tbody tr th td footer noscript script "
)
"""Those of the template."""
NAMES = {"kind", "rule", "align", "narrow", "follows", "template", "argv", "url"}
"""Fields whose values steer a page, and are made by us."""


def tainted(value: Any, name: str = "") -> Any:
    """The same data with markup behind every text in it."""
    if isinstance(value, Enum) or name in NAMES:
        return value
    if isinstance(value, str):
        return f"{value}{EVIL}{LINK}"
    if isinstance(value, tuple | list):
        return type(value)(tainted(each, name) for each in value) if type(value) in {tuple, list} else value
    if is_dataclass(value) and not isinstance(value, type):
        changed = {each.name: tainted(getattr(value, each.name), each.name) for each in fields(value) if each.init}
        try:
            return replace(value, **changed)
        except (TypeError, ValueError, AttributeError):
            return value
    return value


def sources() -> dict[str, Page]:
    """Pages made of data with markup where a user's model, hosts and scripts have names."""
    names = [f"h.{number}{EVIL}{LINK}" for number in range(5)]
    frames = [
        frame(order, name, tensor(f"output{EVIL}", absmax=2.0**order), batch=b)
        for b in range(3)
        for order, name in enumerate(names)
    ]
    hang = hanging("behind", 4, 2)
    reports = {}
    for name, report in {"comm-bad-pair": bad_pair(), "comm-missing-rank": missing_rank()}.items():
        ranks = tuple(
            replace(claim, host=tainted(claim.host), interface=tainted(claim.interface)) for claim in report.ranks
        )
        hosts, said = tainted(report.hosts), tainted(report.phases)
        reports[name] = comm_page.page_of(replace(report, ranks=ranks, hosts=hosts, phases=said))
    return {
        "trace": trace_page({EVIL: drawn(*frames), LINK: drawn(*frames)}, "float16", title=EVIL, meta=(LINK,)),
        "hang": hang_page(replace(hang, ranks=hang.ranks), tainted(judge(hang))),
        **reports,
    }


class Tags(HTMLParser):
    """Every tag with its attributes, as a browser would read them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def texts_of(value: Any) -> Iterator[str]:
    """Every text that a picture may show; names of groups are keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from texts_of(name)
            yield from () if name == "legendgroup" else texts_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts_of(each)


def with_tainted_texts(made: Page) -> Page:
    """The page with markup in each of its own texts; its pictures are as they are."""
    parts = tuple(
        replace(part, title=tainted(part.title), caption=tainted(part.caption))
        if isinstance(part, Picture)
        else tainted(part)
        for part in made.parts
    )
    return replace(tainted(replace(made, parts=())), parts=parts)


def check(made: Page) -> None:
    """No tag and no handler but those of the template; no tag of plotly's in a picture but line breaks, bold and the like."""
    page = rendered(made)
    without_scripts = re.sub(r"(?s)<script>.*?</script>", "<script></script>", page)
    tags = Tags(without_scripts).found

    assert {tag for tag, _ in tags if f" {tag} " not in TAGS} == set()
    assert sum(tag == "script" for tag, _ in tags) <= 2
    handlers = [name for _, attributes in tags for name in attributes if name.startswith("on")]
    links = [attributes["href"] for tag, attributes in tags if tag == "a"]
    assert (handlers, [link for link in links if not str(link).startswith("https://")]) == ([], [])
    assert "document.taint" in Tags(without_scripts).text or not made.findings
    for part in made.parts:
        if isinstance(part, Picture):
            texts = list(texts_of(json.loads(part.figure.to_json())))
            assert [
                text for text in texts if re.search(r"<(?!/?(?:b|br|i|span|extra|sub|sup)\b)[a-zA-Z/!]", text)
            ] == []
            assert [text for text in texts if re.search(r"<[^>]*\b(?:on\w+|href)\s*=", text)] == []


@pytest.mark.slow
@each("name", [*PAGES])
def test_markup_in_each_text_of_a_page_stays_text(name: str) -> None:
    check(with_tainted_texts(PAGES[name]()))


@each("name", ["hang", "comm-missing-rank"])
@pytest.mark.slow
def test_markup_in_what_a_page_is_made_of_stays_text(name: str) -> None:
    check(sources()[name])


@pytest.mark.slow
@each("name", ["trace", "comm-bad-pair"])
def test_markup_in_what_a_page_with_pictures_is_made_of_stays_text(name: str) -> None:
    check(sources()[name])


@pytest.mark.browser
@pytest.mark.parametrize(
    "name", [*PAGES, *(f"made of {source}" for source in ("trace", "hang", "comm-bad-pair", "comm-missing-rank"))]
)
def test_nothing_of_it_runs_in_a_browser(name: str, tmp_path: Path) -> None:
    from tests.ui.browser import LOOK, View, looked_at

    source = name.removeprefix("made of ")
    made = sources()[source] if source != name else with_tainted_texts(PAGES[name]())
    path = tmp_path / "page.html"
    write_page(made, path)

    (told,) = looked_at(path, View())

    assert "tainted" in LOOK
    assert told["tainted"] == 0
    assert told["images"] == 0
