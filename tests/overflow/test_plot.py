"""The picture of a run. Its data here; the page in a real browser below (marked, it takes seconds)."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.overflow.frames.frame import CallPhase, Frame
from dsdoctor.overflow.trace.headroom import MAX_COLUMNS, Bad, Extreme, HeatCell, ModuleRow, Picture, picture
from dsdoctor.overflow.trace.page import figure, label, page_of
from dsdoctor.ui import page
from dsdoctor.ui.page import Page
from tests.overflow.on_disk import chain
from tests.overflow.written import backward, frame, tensor

REPORT = Path(page.__file__).parent
PACKAGE = Path(page.__file__).parents[1]
EVIL = "<script>document.body.dataset.owned=1</script><img src=x onerror=document.body.dataset.owned=1>"


def drawn(*frames: Frame, phase: CallPhase = CallPhase.FORWARD) -> Picture:
    return picture(((0, frame) for frame in frames), phase=phase)


def test_a_row_has_the_range_of_its_outputs_and_the_headroom_of_all_it_holds() -> None:
    found = drawn(frame(0, "h.0", tensor("weight", absmax=9.0), tensor("output", absmin_nonzero=1e-4), batch=7))

    whole = {"dtype": "float16", "shape": (2, 4), "batch": 7, "rank": 0}
    assert found.rows == {
        ("h.0", 0): ModuleRow(
            module="h.0",
            kind="Linear",
            call=0,
            most=Extreme(value=3.0, tensor="output", **whole),
            least=Extreme(value=1e-4, tensor="output", **whole),
            bad=None,
            cells={0: HeatCell(absmax=9.0, bad=False)},
        )
    }
    assert (found.first, found.batches, found.dtypes) == (7, 1, {"float16": None})


def test_a_nan_marks_the_row_and_the_cell() -> None:
    found = drawn(*chain(0, 2.0), frame(0, "h.0", tensor("output", nan=2, neginf=1), batch=1))

    row = found.rows["h.0", 0]
    assert row.bad == Bad(tensor="output", nan=2, inf=1, batch=1, rank=0)
    assert [cell.bad for cell in row.cells.values()] == [False, True]


def test_a_long_run_has_several_batches_in_a_column() -> None:
    found = drawn(*(frame for batch in range(1000) for frame in chain(batch, float(batch))))

    assert (found.width, found.batches, len(found.columns)) == (8, 1000, 125)
    assert len(found.columns) <= MAX_COLUMNS
    assert found.rows["h.0", 0].cells[124].absmax == 999.0


def test_gradients_are_a_picture_of_their_own() -> None:
    found = drawn(*chain(0, 2.0), backward(1, "h.0", tensor("grad weight", absmax=7.0)), phase=CallPhase.BACKWARD)

    most = found.rows["h.0", 0].most
    assert most is not None
    assert (most.tensor, most.value) == ("grad weight", 7.0)


@pytest.mark.parametrize("name", ["p.txt", "p", "none/p.html"])
def test_a_file_that_cannot_be_drawn_into_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        page.check_target(tmp_path / name)


def test_no_half_page_is_left(tmp_path: Path) -> None:
    def breaks() -> Iterator[str]:
        yield "one"
        raise OSError("the disk is full")

    target = tmp_path / "p.html"
    target.write_text("the page before")

    with pytest.raises(OSError, match="full"):
        page.write_page(Page(title="x", run=breaks(), verdict=""), target)  # type: ignore[arg-type]

    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]
    assert target.read_text() == "the page before"


def test_where_there_is_no_chrome_the_next_step_is_named(tmp_path: Path) -> None:
    class NoChrome:
        class layout:
            height = 500

        def to_image(self, **_: object) -> bytes:
            raise RuntimeError("Kaleido requires Google Chrome to be installed.")

    with pytest.raises(ImpossiblePlan, match="requires Google Chrome") as caught:
        page.write_image(NoChrome(), tmp_path / "p.png")  # type: ignore[arg-type]

    assert "apt-get install chromium" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_the_figure_shows_two_runs_in_the_order_of_execution() -> None:
    pytest.importorskip("plotly")
    a = drawn(*chain(0, 2.0, 70000.0, dtype="bfloat16"), frame(2, EVIL, tensor("output", nan=1)))
    b = drawn(*chain(0, 2.5, 3.0), frame(2, "only.in.b", tensor("output")))

    shown = figure({"a": a, "b": b}, "float16", title="<b>x", meta=["<i>y"])

    rows = ["h.0", "h.1", label(ModuleRow(EVIL, "", 0)), "only.in.b"]
    heat = [trace for trace in shown.data if trace.type == "heatmap"]
    dots = [trace for trace in shown.data if trace.type == "scatter" and trace.mode == "markers"]
    assert [list(trace.y) for trace in heat] == [rows, rows, rows]
    assert [[None if cell is None else round(cell, 1) for (cell,) in trace.z] for trace in heat] == [
        [15.0, -0.1, 14.4, None],
        [None, None, 1, None],
        [14.7, 14.4, None, 14.4],
    ]
    assert [trace.name for trace in dots] == [
        "a: least above 0 to largest",
        "nan or inf (a)",
        "b: least above 0 to largest",
    ]
    assert dots[0].text[1] == (
        "<b>h.1</b> Linear<br>abs max 7.000e+04 in output bfloat16 [2, 4], batch 0, rank 0"
        "<br>-0.1 bits below float16&#x27;s limit 6.55e+04<br>least above zero 5.000e-01 in output bfloat16 [2, 4], batch 0, rank 0"
    ).replace("&#x27;", "'")
    assert next(shown.select_annotations({"name": "heading"})).text == "&lt;b&gt;x<br><sup>&lt;i&gt;y</sup>"
    assert shown.layout.yaxis.range == (3.5, -0.5)
    assert not re.search(r"<(script|img|b>x|i>)", shown.to_json().replace("\\u003c", "<"))


def test_plotly_is_imported_only_where_it_draws() -> None:
    for name in ("ui/page", "overflow/trace/page"):
        assert not re.search(
            r"^(import|from) (plotly|jinja2|markupsafe)",
            (PACKAGE / f"{name}.py").read_text(encoding="utf-8"),
            re.MULTILINE,
        )


# -- in a real browser


def chromium() -> str:
    """Chromium, which CI installs."""
    found = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if not found:
        pytest.fail("there is no Chromium on PATH: apt-get install chromium")
    return found


def opened(file: Path, *options: str) -> str:
    """The page's DOM after its scripts ran, without a network."""
    argv = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    argv += ["--virtual-time-budget=20000", *options, "--dump-dom", file.as_uri()]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def drawn_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with 400 modules, of which one has an evil name and one a nan."""
    names = [f"model.layers.{index // 10}.part{index % 10}" for index in range(398)] + [EVIL, "bad"]
    frames = [
        frame(order, name, tensor("output", absmax=1.0 + order, nan=int(name == "bad")), batch=batch)
        for batch in range(30)
        for order, name in enumerate(names)
    ]
    path = tmp_path_factory.mktemp("page") / "page.html"
    page.write_page(
        page_of({"": drawn(*frames)}, "float16", title=f"a run {EVIL}", meta=(f"rank 0 of 1 {EVIL}",)), path
    )
    return path


@pytest.mark.browser
def test_a_browser_draws_the_page_without_a_network(drawn_page: Path) -> None:
    dom = opened(drawn_page)

    assert re.search(r'<body[^>]* data-drawn="yes"', dom)
    assert "data-owned" not in re.search(r"<body[^>]*>", dom)[0]  # type: ignore[index]
    assert "model.layers.39.part7</text>" in dom
    assert dom.count('class="ytick"') == 400
    assert "nan or inf in this batch" in dom
    assert not re.search(r"""(src|href)=["']https?:""", drawn_page.read_text(encoding="utf-8").split("<script")[0])


@pytest.mark.browser
def test_the_page_is_dark_where_the_reader_asks_for_it(drawn_page: Path) -> None:
    dom = opened(drawn_page, "--blink-settings=preferredColorScheme=0")

    assert re.search(r'<body class="dark"', dom)
    assert "rgb(20, 23, 26)" in dom


@pytest.mark.browser
def test_an_image_is_drawn(tmp_path: Path) -> None:
    chromium()
    target = tmp_path / "p.png"

    page.write_image(figure({"": drawn(*chain(0, 2.0, 3.0))}, "float16", title="x", meta=[]), target)

    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert target.stat().st_size > 10_000
