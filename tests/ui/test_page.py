"""The template of all pages: what it shows, in which order, and that no text of others becomes a tag."""

import re
from importlib.metadata import requires
from pathlib import Path

import pytest

from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, alternative, step
from dsdoctor.core.release import ADDRESS
from dsdoctor.ui.page import Listing, Page, Table, check_target, rendered

EVIL = "<script>x()</script>\u202e\x1b[31m"
WORST = Finding.error(
    "rank-missing",
    "rank 3 never came",
    evidence=("it was last seen on nodeb",),
    fix="look at what it wrote",
    steps=(step("ssh {host} dmesg", host="nodeb; rm -rf /"), alternative("python -m dsdoctor comm")),
)


def words(page: str) -> str:
    """What a reader sees, without its style and its script."""
    return " ".join(re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(style|script)>.*?</\1>", "", page)).split())


def test_the_verdict_comes_before_the_advice_and_the_advice_before_the_tables() -> None:
    listing = Listing(title="stacks", lines=("a", "b"))
    table = Table(title="ranks", head=("rank", "state"), rows=(("3", "✗ missing"),), align="><")
    page = words(
        rendered(
            Page(title="dsdoctor hang", run=("4 ranks",), verdict="✗ one", findings=(WORST,), parts=(table, listing))
        )
    )

    places = [
        page.index(part) for part in ("✗ one", "4 ranks", "rank 3 never came", "look at what", "✗ missing", "stacks")
    ]
    assert places == sorted(places)


def test_a_step_says_whether_it_comes_after_or_instead_and_its_values_are_quoted() -> None:
    page = rendered(Page(title="t", run=(), verdict="✗ v", findings=(WORST,)))

    assert "ssh &#39;nodeb; rm -rf /&#39; dmesg" in page
    assert re.search(r"<i>or +</i>python -m dsdoctor comm", page)


def test_a_rule_leads_to_its_page_where_it_is_known_where_that_is_and_nowhere_else() -> None:
    published = Finding.error("a-rule", "t")
    object.__setattr__(published, "url", "https://example.org/rules/a-rule/")
    page = rendered(Page(title="t", run=(), verdict="✗ v", findings=(published, WORST)))

    assert re.findall(r'href="([^"]*)"', page) == ["https://example.org/rules/a-rule/"]
    assert 'title="dsdoctor explain rank-missing"' in page or ADDRESS


def test_three_findings_are_shown_the_worst_first_and_the_others_are_counted() -> None:
    notes = tuple(Finding.note(f"note-{number}", f"note {number}") for number in range(4))
    page = words(rendered(Page(title="t", run=(), verdict="✗ v", findings=(*notes, WORST))))

    assert page.index("rank 3 never came") < page.index("note 0")
    assert "and 2 notes" in page
    assert page.index("note 1") < page.index("and 2 notes") < page.index("note 3")


@pytest.mark.parametrize("place", ["title", "run", "verdict", "finding", "cell", "line"])
def test_text_of_others_is_no_tag_and_steers_nothing(place: str) -> None:
    made = {name: EVIL if name == place else "x" for name in ("title", "run", "verdict", "finding", "cell", "line")}
    finding = Finding.warning("r", made["finding"], evidence=(made["finding"],), fix=made["finding"])
    parts = (Table(title=made["cell"], head=("", made["cell"]), rows=((made["cell"], made["cell"]),)),)
    lines = Listing(title=made["line"], lines=(made["line"],))

    page = rendered(
        Page(
            title=made["title"], run=(made["run"],), verdict=made["verdict"], findings=(finding,), parts=(*parts, lines)
        )
    )

    assert page.count("<script>") == 1
    assert "&lt;script&gt;" in page
    assert not {"\u202e", "\x1b"} & set(page)


def test_a_page_without_a_picture_is_small() -> None:
    assert len(rendered(Page(title="t", run=(), verdict="✓ v"))) < 20_000


def test_a_target_that_is_no_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no page"):
        check_target(tmp_path / "page.png")


def test_what_draws_pages_is_in_the_extra_plot() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")

    (plot,) = re.findall(r"^plot = \[(.*)\]$", text, re.MULTILINE)
    assert {"jinja2", "plotly", "kaleido"} == set(re.findall(r'"([a-z0-9]+)', plot))
    assert requires("jinja2") is not None


def test_no_error_is_folded_away() -> None:
    errors = tuple(Finding.error("r", f"error {number}") for number in range(7))
    page = rendered(Page(title="t", run=(), verdict="✗ v", findings=(Finding.warning("w", "a warning"), *errors)))

    assert page.index("error 6") < page.index("<details><summary>and 1 warning") < page.index("a warning")
