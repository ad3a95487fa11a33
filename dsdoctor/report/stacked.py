"""A figure whose panels stand beside each other -> the changes of its layout that put them below each other, for a telephone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MARGIN = {"margin.t": 30, "margin.b": 50, "margin.l": 10, "margin.r": 14}
GAP = 96
"""Pixels between two panels: the ticks of one, and the title of the next."""


def stacked(shown: "Figure", heights: Sequence[int], *, gap: int = GAP, top: int = 60) -> dict[str, object]:
    """What changes: each panel takes the whole width. ``heights``: pixels of each, in the order of their axes.

    The first annotations are the panels' titles, as make_subplots adds them.
    """
    total = sum(heights) + gap * (len(heights) - 1)
    found: dict[str, object] = {**MARGIN, "margin.t": top, "height": total + top + MARGIN["margin.b"]}
    above = 0
    for place, height in enumerate(heights):
        number = "" if not place else str(place + 1)
        end, start = 1 - above / total, max(0.0, 1 - (above + height) / total)
        found |= {f"xaxis{number}.domain": [0, 1], f"yaxis{number}.domain": [start, end]}
        if f"yaxis{number}" in shown.layout and shown.layout[f"yaxis{number}"].showticklabels is False:
            found[f"yaxis{number}.showticklabels"] = True
        if place < len(shown.layout.annotations):
            title = f"annotations[{place}]"
            found |= {f"{title}.x": 0, f"{title}.y": end, f"{title}.xanchor": "left"}
        above += height + gap
    return found
