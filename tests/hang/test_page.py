"""The page of a hang: the timeline and the tables of made incidents."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dsdoctor.hang.incidents import write_ranks
from dsdoctor.hang.models import NOT_LOOKED, Incident, Operation
from dsdoctor.hang.page import page_of, write_page
from dsdoctor.hang.verdict import judge
from dsdoctor.ui.page import Picture, Table
from tests.cli.runner import run
from tests.hang.made import calling, elsewhere, incident, operation, view

NAMES = ("all_gather", "reduce_scatter", "all_reduce")
WHEN = 1_700_000_000.0


def calls(last: int, *, other: bool = False, ended: bool = False) -> tuple[Operation, ...]:
    """The calls of a rank up to a number, one every tenth of a second; the last one another than usual."""
    return tuple(
        replace(
            operation(
                number,
                "barrier" if other and number == last else NAMES[number % 3],
                99,
                state="scheduled" if number == last and not ended else "done",
            ),
            called=WHEN - 60 + (number - last) / 10,
        )
        for number in range(1, last + 1)
    )


def hanging(kind: str, world: int, odd: int) -> Incident:
    """All ranks wait in call 56; one sleeps before it, or called another one."""
    strange = {
        "behind": view(odd, elsewhere(), 55, world=world, operations=calls(55, ended=True)),
        "other": view(odd, calling("barrier", 77), 56, world=world, operations=calls(56, other=True)),
    }[kind]
    usual = [
        view(rank, calling("all_reduce"), 56, world=world, operations=calls(56)) for rank in range(world) if rank != odd
    ]
    return incident(*sorted([strange, *usual], key=lambda each: each.rank), world=world, when=WHEN)


def tables(made: Incident) -> dict[str, Table]:
    """The tables of a page by their titles."""
    return {part.title: part for part in page_of(made, judge(made)).parts if isinstance(part, Table)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cell"), [("behind", "✗ –"), ("other", "✗ barrier 99")])
@pytest.mark.parametrize(("world", "odd"), [(3, 0), (4, 2), (128, 77)])
def test_the_rank_that_parted_is_marked_among_the_calls(kind: str, cell: str, world: int, odd: int) -> None:
    found = tables(hanging(kind, world, odd))

    rows = {row[0]: row for row in found["the last collectives of group 0"].rows}
    assert len(rows) == 2
    assert rows[f"rank {odd}"][-1] == cell
    assert not any(text.startswith("✗") for name, row in rows.items() if name != f"rank {odd}" for text in row)
    assert found["state of each rank"].rows[0][0].startswith(f"rank {odd} ")


@pytest.mark.slow
def test_the_timeline_has_a_row_for_each_rank_and_of_many_one_for_those_that_are_alike() -> None:
    from dsdoctor.hang.incident_view import IncidentView
    from dsdoctor.hang.page import ABSENT, WAITS, figure

    few, many = (figure(IncidentView(hanging("behind", world, 1))) for world in (4, 512))

    assert list(few.data[0].y) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert list(few.data[0].marker.color) == [WAITS, ABSENT, WAITS, WAITS]
    assert [round(seconds) for seconds in few.data[0].x] == [60] * 4
    assert sum(len(trace.x) for trace in few.data[1:]) == 3 * 56 + 55
    assert list(many.data[0].y) == ["rank 1", "ranks 0, 2-511"]


class Tags(HTMLParser):
    """The names of all tags, and what the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.fetched: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.fetched += [value for name, value in attrs if name == "src" or (name == "href" and tag != "a")]


@pytest.mark.slow
def test_what_a_source_line_holds_is_text_and_no_tag(tmp_path: Path) -> None:
    evil = calling("all_reduce")[:1]
    evil = (replace(evil[0], text="<img src=x onerror=alert(1)>", function="</script><b>"), *calling("all_reduce")[1:])
    made = hanging("other", 3, 1)
    made = replace(made, ranks=(view(0, evil, 56, world=3, operations=calls(56)), *made.ranks[1:]), when=1e308)
    write_page(made, judge(made), tmp_path / "page.html")

    text = (tmp_path / "page.html").read_text()
    parser = Tags()
    parser.feed(text)
    assert "img" not in parser.seen
    assert "onerror" in text
    assert parser.fetched == []


@pytest.mark.slow
def test_without_times_there_is_no_picture_and_the_tables_are_there() -> None:
    made = hanging("behind", 3, 1)
    bare = [replace(each, sample=replace(each.sample, groups=())) for each in made.ranks if each.sample]

    parts = page_of(replace(made, ranks=tuple(bare)), judge(made)).parts

    assert [part.title for part in parts] == ["state of each rank", "stacks of all ranks, grouped"]


@pytest.mark.slow
def test_the_command_writes_the_page_beside_its_verdict(tmp_path: Path) -> None:
    write_ranks(tmp_path / "run", hanging("other", 3, 1))
    target = tmp_path / "page.html"

    done = run("hang", str(tmp_path / "run"), "--html", str(target))
    refused = run("hang", str(tmp_path / "run"), "--html", str(tmp_path / "page.png"))

    assert (done.returncode, refused.returncode) == (1, 2)
    *_, page, following = done.stdout.splitlines()
    assert page == f"the page: {target}"
    assert following.startswith("  next: $ ")
    assert "rank 1: barrier of 99; ranks 0, 2: all_reduce of 99" in target.read_text()


def test_calls_of_ranks_that_have_not_looked_lately_are_not_drawn() -> None:
    """Their samples tell only where they were."""
    old = hanging("behind", 2, 1)
    old = replace(old, ranks=tuple(replace(each_one, unread=NOT_LOOKED, age=70.0) for each_one in old.ranks))

    page = page_of(old, judge(old))

    assert not any(isinstance(part, Picture) for part in page.parts)
