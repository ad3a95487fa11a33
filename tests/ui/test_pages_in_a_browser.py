"""Every page in Chromium, as wide as a window and as a telephone, light and dark: drawn, nothing overlaps, keys work.

DSDOCTOR_SCREENSHOTS names a folder in which the pictures are kept, to be looked at.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.comm import page as comm_page
from dsdoctor.hang.page import page_of as hang_page
from dsdoctor.hang.verdict import judge
from dsdoctor.memory.page import page_of as memory_page
from dsdoctor.memory.predict import changes, overheads_of
from dsdoctor.overflow.trace.page import page_of as trace_page
from dsdoctor.ui import page
from dsdoctor.ui.page import Page, Picture
from tests.comm.reports import bad_pair, healthy_4, many, missing_rank, slow_node
from tests.hang.test_page import hanging
from tests.memory.test_changes import examined, situation
from tests.overflow.test_plot import drawn
from tests.overflow.written import frame, tensor

WIDTHS = (1280, 400)
META = ("rank 0 of 8, float16, ZeRO-2",)


def small() -> Page:
    frames = [
        frame(order, f"h.{order}", tensor("output", absmax=2.0**order), batch=b) for b in range(9) for order in range(5)
    ]
    return trace_page({"": drawn(*frames)}, "float16", title="small", meta=META)


def two_runs() -> Page:
    names = [f"model.layers.{number // 7}.self_attention.part{number % 7}" for number in range(70)]
    frames = [
        frame(
            order, name, tensor("output", absmax=2.0 ** (order % 17), nan=int(order == 40 and batch > 4)), batch=batch
        )
        for batch in range(9)
        for order, name in enumerate(names)
    ]
    run = drawn(*frames)
    return trace_page({"bf16": run, "fp32": run}, "float16", title="two runs", meta=META * 2)


def memory() -> Page:
    now = situation(2, offload_optimizer="cpu")
    beside = overheads_of(now.predicted().peak.device, world=4)
    done = replace(examined(now, ()), overheads=beside, changes=changes(now))
    return memory_page(done, limit=700 << 20, fits="✗ it does not fit 4x0.7G")


def hang(kind: str, world: int, odd: int) -> Page:
    made = hanging(kind, world, odd)
    return hang_page(made, judge(made))


PAGES: dict[str, Callable[[], Page]] = {
    "trace-small": small,
    "trace-two-runs": two_runs,
    "comm-bad-pair": lambda: comm_page.page_of(bad_pair()),
    "comm-healthy": lambda: comm_page.page_of(healthy_4()),
    "comm-slow-node": lambda: comm_page.page_of(slow_node()),
    "comm-64-ranks": lambda: comm_page.page_of(many(8)),
    "comm-missing-rank": lambda: comm_page.page_of(missing_rank()),
    "hang-one-behind": lambda: hang("behind", 4, 2),
    "hang-another-call": lambda: hang("other", 128, 77),
    "memory": memory,
}


@pytest.mark.browser
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_drawn_fits_and_has_nothing_over_anything_else(name: str, tmp_path: Path) -> None:
    from tests.ui.browser import View, looked_at

    made, path = PAGES[name](), tmp_path / "page.html"
    page.write_page(made, path)
    kept = os.environ.get("DSDOCTOR_SCREENSHOTS")
    views = [View(width=width, dark=dark) for width, dark in ((1280, False), (400, True))]
    shots = [Path(kept) / f"{name}-{view.width}{'-dark' if view.dark else ''}.png" if kept else None for view in views]

    found = looked_at(path, *(View(**{**vars(view), "shot": shot}) for view, shot in zip(views, shots, strict=True)))

    for view, told in zip(views, found, strict=True):
        wrong = {what: told[what] for what in ("scrolls", "overlaps", "outside", "asked") if told[what]}
        assert wrong == {}, (view, told["texts"])
        assert told["dark"] is view.dark
        assert told["paper"] == ("rgb(20, 23, 26)" if view.dark else "rgb(255, 255, 255)")
        assert made.verdict in " ".join(told["words"].split())
        assert told["filled"] > 0.9
    least = 240 if name.startswith("hang") else 400
    assert least <= found[0]["height"] <= 9200 or not found[0]["height"]


@pytest.mark.browser
def test_a_page_is_used_with_keys_alone(tmp_path: Path) -> None:
    from tests.ui.browser import View, looked_at

    path = tmp_path / "page.html"
    page.write_page(PAGES["comm-healthy"](), path)

    before, zoomed, back, hidden, theme = looked_at(
        path,
        View(),
        View(focus=".plot", keys=("+",)),
        View(focus=".plot", keys=("+", "ArrowUp", "0")),
        View(focus=".legend button", keys=("Enter",)),
        View(focus="#theme", keys=("Enter",)),
    )

    assert span(zoomed) == pytest.approx(0.8 * span(before))
    assert back["range"] == before["range"]
    assert before["legend"][0] == ["all_reduce", "true"]
    assert hidden["legend"][0] == ["all_reduce", "false"]
    assert (before["dark"], theme["dark"]) == (False, True)


def span(told: dict[str, Any]) -> float:
    low, high = told["range"]
    return float(high - low)


@pytest.mark.browser
def test_words_over_words_and_beside_the_window_are_found(tmp_path: Path) -> None:
    """That nothing overlaps is only worth what is found where something does."""
    from tests.ui.browser import View, looked_at

    made = PAGES["comm-healthy"]()
    (picture, *rest) = made.parts
    assert isinstance(picture, Picture)
    for text, x in (("one over", 0.3), ("two over", 0.301), ("far away", 1.2)):
        picture.figure.add_annotation(text=text, x=x, y=0.5, xref="paper", yref="paper", showarrow=False)
    path = tmp_path / "page.html"
    page.write_page(replace(made, parts=(replace(picture, narrow={}), *rest)), path)

    (found,) = looked_at(path, View())

    assert any({"one over", "two over"} == set(pair) for pair in found["overlaps"])
    assert "far away" in found["outside"]
