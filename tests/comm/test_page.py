"""The page of a test of communication. Its data here; the page in a real browser below (marked, it takes seconds)."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.comm.page import figure, page_of, write_page
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.errors import UsageError
from dsdoctor.ui.page import Picture, rendered
from tests.comm.reports import bad_pair, healthy_2, healthy_4, many, missing_rank, report, slow_node
from tests.overflow.test_plot import EVIL, opened

pytest.importorskip("plotly")


def layers(shown: object) -> dict[str, list[list[float | None]]]:
    """The heat maps by their names; that of the bandwidths has none."""
    return {trace.name or "": [list(line) for line in trace.z] for trace in shown.data if trace.type == "heatmap"}  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_slow_node_is_a_row_and_a_column_of_its_own_colour() -> None:
    found = layers(figure(slow_node()))

    assert found["below a third of the median"] == [
        [None, None, 1, None],
        [None, None, 1, None],
        [1, 1, None, 1],
        [None, None, 1, None],
    ]
    assert [round(10**value / 1e6) for value in found[""][0] if value] == [1560, 1321]


@pytest.mark.slow
def test_an_unreached_direction_is_marked_and_told_where_it_is_pointed_at() -> None:
    shown = figure(bad_pair())

    (lost,) = (trace for trace in shown.data if trace.name == "not reached")
    assert [(row, column) for row, line in enumerate(lost.z) for column, value in enumerate(line) if value] == [(1, 3)]
    assert lost.customdata[1][3] == "rank 1 (nodeb) -&gt; rank 3 (noded): timed out after 3.00 s (10.200.0.4)"


def test_curves_have_the_limit_beside_them_and_bars_tell_the_pace() -> None:
    shown = figure(healthy_4())

    curves = [trace for trace in shown.data if trace.type == "scatter" and trace.mode == "lines+markers"]
    bars = [trace for trace in shown.data if trace.type == "bar"]
    assert [trace.name for trace in curves] == ["all_reduce", "all_gather", "broadcast"]
    assert [round(value, 2) for value in curves[0].y[-2:]] == [1.18, 1.25]
    assert "limit 4.10 GB/s: loopback" in [note.text for note in shown.layout.annotations]
    assert [(trace.name, len(trace.x)) for trace in bars] == [("works alone", 4), ("waits for the others", 4)]


def test_ranks_of_a_host_stand_together_and_lines_part_the_hosts() -> None:
    found = healthy_4()
    shown = figure(replace(found, hosts=("nodea", "nodeb", "nodea", "nodeb"), pairs=()))

    edges = [shape for shape in shown.layout.shapes if shape.x0 == shape.x1 == 1.5]
    assert list(shown.layout.yaxis.ticktext) == ["0 nodea", "2 nodea", "1 nodeb", "3 nodeb"]
    assert len(edges) == 1


@pytest.mark.slow
def test_of_many_ranks_a_cell_is_the_worst_of_two_hosts() -> None:
    found = layers(figure(many(20)))

    assert len(found[""]) == 20
    assert found["not reached"][0][2] == 1
    assert found["below a third of the median"][18][0] == 1


def test_where_nothing_was_tried_words_stand_in_place_of_a_picture() -> None:
    page = rendered(page_of(missing_rank()))

    assert "nothing was timed" in page
    assert "plotly" not in page


def test_pairs_that_were_reached_and_not_timed_are_no_grey_squares() -> None:
    found = healthy_2()
    reached = tuple(replace(reach, bandwidth=None) for reach in found.reaches)
    (lost, *others) = reached

    assert not any(isinstance(part, Picture) for part in page_of(replace(found, reaches=reached)).parts)
    cut = replace(lost, outcome=ConnectOutcome.TIMED_OUT)
    assert any(isinstance(part, Picture) for part in page_of(replace(found, reaches=(cut, *others))).parts)


def test_the_words_of_others_are_no_tags() -> None:
    evil = bad_pair(EVIL)
    found = report((EVIL, EVIL, "c", "d"), evil.phases, reaches=evil.reaches, versions={EVIL: EVIL}, launcher=EVIL)

    told = rendered(replace(page_of(found), parts=()))
    drawn = figure(found).to_json().replace("\\u003c", "<").replace("\\u003e", ">")

    assert told.count("<script") == 1
    assert not re.search(r"<(script|img)", drawn + told.replace("<script>\n", ""))
    assert "&lt;script&gt;" in told


def test_a_target_that_is_no_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        write_page(healthy_2(), tmp_path / "page.txt")


# -- in a real browser

WATCH = """<meta http-equiv="Content-Security-Policy" content="default-src 'unsafe-inline' 'unsafe-eval' data: blob:">
<script>addEventListener("securitypolicyviolation", function (event) { document.body.dataset.asked = event.blockedURI; });
</script>"""


@pytest.mark.browser
def test_a_browser_draws_the_page_and_names_the_bad_pair(tmp_path: Path) -> None:
    """``data-asked`` would be there if the page had asked for anything that is not inside of it."""
    path = tmp_path / "page.html"
    write_page(bad_pair(f"rank 1 (nodeb) cannot reach rank 3 (noded) {EVIL}"), path)

    path.write_text(path.read_text(encoding="utf-8").replace("<head>", f"<head>{WATCH}", 1), encoding="utf-8")

    dom = opened(path)

    assert re.search(r'<body[^>]* data-drawn="yes"', dom)
    assert "data-owned" not in re.search(r"<body[^>]*>", dom)[0]  # type: ignore[index]
    assert "rank 1 (nodeb) cannot reach rank 3 (noded)" in dom
    assert re.search(r">✗</text>", dom)
    assert "not reached</button>" in dom
    assert ">3 noded</text>" in dom
    assert "data-asked" not in dom


@pytest.mark.browser
def test_sixty_four_ranks_are_drawn_dark_where_the_reader_wishes_it(tmp_path: Path) -> None:
    write_page(many(8), tmp_path / "page.html")

    dom = opened(tmp_path / "page.html", "--blink-settings=preferredColorScheme=0")

    assert re.search(r'<body class="dark"', dom)
    assert dom.count("node0") > 8
    assert ">48-55 node06</text>" in dom
    assert "limit 4.10 GB/s: loopback</text>" in dom
