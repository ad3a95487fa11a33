"""A plotly figure -> one image, drawn by Chrome by way of kaleido. Written beside and renamed: never half of it."""

from pathlib import Path
from typing import TYPE_CHECKING

from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.files import write_bytes
from dsdoctor.report.page import EXTRA

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ENDINGS = (".png", ".svg", ".pdf")
WIDTH, SHARPNESS = 1500, 2
MOST_PIXELS = 8000
NO_IMAGE = (
    f"kaleido is needed ({EXTRA}) and Chrome or Chromium on PATH (apt-get install chromium); "
    "a page (-o page.html) needs neither"
)


def write(shown: "Figure", path: Path) -> None:
    """Write the figure as what the file's name says. Raises ImpossiblePlan where there is no Chrome."""
    write_bytes(path, _drawn(shown, path.suffix.lower()[1:]))


def _drawn(shown: "Figure", kind: str) -> bytes:
    height = shown.layout.height
    scale = max(min(SHARPNESS, MOST_PIXELS / height), 1)
    try:
        image: bytes = shown.to_image(format=kind, width=WIDTH, height=height, scale=scale)
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise ImpossiblePlan(f"no image could be drawn: {said}", hint=NO_IMAGE) from error
    return image
