"""A Page (title, run, verdict, advice, then pictures and tables) -> one HTML file that needs no network.

All pages are drawn by one template, page.html.jinja, which needs jinja2; a page with a Picture needs plotly too. Both come with
``pip install "dsdoctor[plot]"`` and are imported only where a page is written. So a command makes a page:

    page.check_target(path)          # before any work: a target that cannot be written is refused
    page.check_extra()               # with a Picture: page.check_extra(plotly=True)
    page.write_page(
        Page(
            title="dsdoctor hang, 4 ranks",
            run=("4 ranks by torchrun", "torch 2.13.0"),   # a fact that begins with a mark is coloured
            verdict="✗ rank 3 has not reached the collective: ...",           # begins with a mark: ✓ ! ✗ ·
            findings=verdict.findings,                      # three are shown with their steps, the others folded
            parts=(Table(...), Listing(...), Picture(...)),
        ),
        path,
    )

Every text is given as it is, for example as another host sent it: the template escapes it. Only what is inside a plotly
figure must be made safe by overflow/trace/page.py, because plotly reads tags.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.files import check_target as check_place
from dsdoctor.core.files import write_bytes
from dsdoctor.core.finding import Finding, Step
from dsdoctor.core.release import __version__
from dsdoctor.ui.screen import counted, divided
from dsdoctor.ui.terminal import MARKS, printable

if TYPE_CHECKING:
    from jinja2 import Environment
    from plotly.graph_objects import Figure


PAGE_SUFFIXES = (".html", ".htm")
TEMPLATE = Path(__file__).with_name("page.html.jinja")
CLASSES = {"✓": "good", "!": "slow", "✗": "bad"}
EXTRA = 'pip install "dsdoctor[plot]"'
MAX_STACKED_COLUMNS = 5
"""Columns of a table whose rows become blocks on a telephone."""
IMAGE_SUFFIXES = (".png", ".svg", ".pdf")
IMAGE_WIDTH_PIXELS, IMAGE_SCALE = 1500, 2
MAX_IMAGE_PIXELS = 8000
NO_IMAGE = (
    f"kaleido is needed ({EXTRA}) and Chrome or Chromium on PATH (apt-get install chromium); "
    "a page (-o page.html) needs neither"
)
MARGIN = {"margin.t": 30, "margin.b": 50, "margin.l": 10, "margin.r": 14}
PANEL_GAP_PIXELS = 96
"""Pixels between two panels: the ticks of one, and the title of the next."""
MAX_LABEL_LENGTH = 58


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A plotly figure with a height, and one sentence on how to read it. ``narrow``: what changes in its layout on a telephone,
    by plotly's own paths such as ``"xaxis2.domain"``."""

    title: str
    figure: "Figure"
    caption: str = ""
    narrow: Mapping[str, object] = field(default_factory=dict)
    kind: Literal["picture"] = field(init=False, default="picture")

    @property
    def height(self) -> int:
        """Pixels."""
        return int(self.figure.layout.height)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of texts. ``align``: ``<`` or ``>`` for each column. A cell that begins with a mark is coloured."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str = ""
    caption: str = ""
    kind: Literal["table"] = field(init=False, default="table")

    @property
    def stacks(self) -> bool:
        """Whether a telephone shows a row's cells below each other: of words in few columns more is seen like that."""
        return len(self.head) <= MAX_STACKED_COLUMNS and any(
            not self.aligned(column) for column in range(1, len(self.head))
        )

    def aligned(self, column: int) -> bool:
        """Whether a column stands at the right."""
        return self.align[column : column + 1] == ">"


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Lines in a fixed width, such as stacks, that are folded unless ``opened``."""

    title: str
    lines: tuple[str, ...]
    opened: bool = False
    kind: Literal["listing"] = field(init=False, default="listing")


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page says, from top to bottom. ``next_step``: a command that no finding's fix has already."""

    title: str
    run: tuple[str, ...]
    verdict: str
    findings: tuple[Finding, ...] = ()
    parts: tuple[Picture | Table | Listing, ...] = ()
    next_step: Step | None = None


def check_target(path: Path) -> None:
    """Raise UsageError for a page that could not be written, before anything is read."""
    if path.suffix.lower() not in PAGE_SUFFIXES:
        raise UsageError(f"{path} is no page", hint="name it .html")
    check_place(path)


def check_extra(*, plotly: bool = False) -> None:
    """Raise ImpossiblePlan where jinja2, or plotly where a picture is to be drawn, is absent."""
    for name in ("jinja2", *(("plotly.graph_objects",) if plotly else ())):
        try:
            import_module(name)
        except ImportError as error:
            raise ImpossiblePlan(f"{error.name} draws the page, but is not installed here", hint=EXTRA) from error


def write_page(page: Page, path: Path) -> None:
    """Write the page beside its place and rename it: never half of one."""
    write_bytes(path, rendered(page).encode("utf-8", errors="replace"))


def rendered(page: Page) -> str:
    """The page as text. plotly's own script is in it where it has a picture, about 5 MB."""
    from markupsafe import Markup

    shown, folded = divided(page.findings)
    figures = [
        {"id": f"plot-{place}", "data": json.loads(part.figure.to_json()), "narrow": dict(part.narrow)}
        for place, part in enumerate(page.parts, 1)
        if isinstance(part, Picture)
    ]
    return (
        _environment()
        .from_string(TEMPLATE.read_text(encoding="utf-8"))
        .render(
            page=page,
            shown=_with_marks(shown),
            folded=_with_marks(folded),
            folded_count=counted(folded),
            figures=Markup(_script_json(figures)),  # noqa: S704  no "<" is left in it
            plotly=Markup(_plotly_script()) if figures else "",  # noqa: S704  plotly's own file
            version=__version__,
        )
    )


def write_image(shown: "Figure", path: Path) -> None:
    """Write the figure as what the file's name says: drawn by Chrome by way of kaleido, written beside and renamed.

    Raises ImpossiblePlan where there is no Chrome.
    """
    write_bytes(path, _drawn(shown, path.suffix.lower()[1:]))


def stacked(
    shown: "Figure", heights: Sequence[int], *, gap: int = PANEL_GAP_PIXELS, top: int = 60
) -> dict[str, object]:
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


def safe(text: str) -> str:
    """Text that a page shows as it is: plotly reads tags in all its texts."""
    return html.escape("".join(char if char.isprintable() else "?" for char in text))


def short(name: str, longest: int = MAX_LABEL_LENGTH) -> str:
    """A label that leaves room for the picture. The end of a module's name says most.

    >>> len(short("x" * 200))
    58
    """
    plain = html.unescape(name)
    shortened = plain if len(plain) <= longest else "…" + plain[1 - longest :]
    return html.escape(shortened)


def _environment() -> "Environment":
    """Every text is escaped, and what would steer a terminal or turn the direction of writing is shown as a code."""
    from jinja2 import Environment

    def shown(value: Any) -> Any:
        return printable(value) if type(value) is str else value

    made = Environment(autoescape=True, finalize=shown, trim_blocks=True, lstrip_blocks=True)
    made.filters["mark_class"] = lambda text: CLASSES.get(text[:1], "")
    return made


def _with_marks(findings: tuple[Finding, ...]) -> list[dict[str, object]]:
    names = ("rule", "title", "evidence", "fix", "url")
    return [
        {"mark": MARKS[finding.severity], **{name: getattr(finding, name) for name in names}} for finding in findings
    ]


def _script_json(value: object) -> str:
    r"""JSON that can stand in a script: no tag can be closed, or opened, by what is in it.

    >>> _script_json(["</script>", "&"])
    '["\\u003c/script\\u003e", "\\u0026"]'
    """
    text = json.dumps(value)
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _plotly_script() -> str:
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


def _drawn(shown: "Figure", kind: str) -> bytes:
    height = shown.layout.height
    scale = max(min(IMAGE_SCALE, MAX_IMAGE_PIXELS / height), 1)
    try:
        image: bytes = shown.to_image(format=kind, width=IMAGE_WIDTH_PIXELS, height=height, scale=scale)
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ImpossiblePlan(f"no image could be drawn: {reason}", hint=NO_IMAGE) from error
    return image
