"""A plotly figure -> one page that needs no network, or one image. Written beside and renamed: never half of it."""

import html
from pathlib import Path
from typing import TYPE_CHECKING

from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.files import check_target as check_place
from dsdoctor.core.files import write_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PAGES, IMAGES = (".html", ".htm"), (".png", ".svg", ".pdf")
WIDTH, SHARPNESS = 1500, 2
MOST_PIXELS = 8000
NO_PLOTLY = 'pip install "dsdoctor[plot]"'
NO_IMAGE = (
    f"kaleido is needed ({NO_PLOTLY}) and Chrome or Chromium on PATH (apt-get install chromium); "
    "a page (-o page.html) needs neither"
)
DIV = "dsdoctor-plot"

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>@title@</title>
<style>
  body { margin: 0; font-family: system-ui, sans-serif; background: #fff; }
  body.dark { background: #14171a; }
  #theme { position: fixed; bottom: 8px; right: 12px; z-index: 10; font: inherit; font-size: 12px; padding: 2px 10px;
           border: 1px solid #8888; border-radius: 4px; background: transparent; color: #777; cursor: pointer; }
  noscript { display: block; padding: 2em; }
</style>
</head>
<body>
<button id="theme" type="button" aria-label="light or dark">light / dark</button>
<noscript>This page draws with JavaScript, all of which is inside of it.</noscript>
@plot@
<script>
(function () {
  var plot = document.getElementById("@div@"), prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  function paint(dark) {
    var ink = dark ? "#d6d9dc" : "#2a3038", grid = dark ? "#2c3238" : "#e6e9ec", paper = dark ? "#14171a" : "#ffffff";
    var look = {"paper_bgcolor": paper, "plot_bgcolor": paper, "font.color": ink};
    Object.keys(plot.layout).filter(function (key) { return /^[xy]axis/.test(key); }).forEach(function (key) {
      look[key + ".gridcolor"] = grid; look[key + ".linecolor"] = grid; look[key + ".zerolinecolor"] = grid;
    });
    document.body.className = dark ? "dark" : "";
    return Plotly.relayout(plot, look);
  }
  paint(prefersDark.matches).then(function () { document.body.dataset.drawn = "yes"; });
  prefersDark.addEventListener("change", function (event) { paint(event.matches); });
  document.getElementById("theme").addEventListener("click", function () { paint(!document.body.className); });
})();
</script>
</body>
</html>
"""


def check_target(path: Path) -> None:
    """Raise UsageError for a file that could not be written, before anything is read."""
    if path.suffix.lower() not in PAGES + IMAGES:
        raise UsageError(f"{path} is neither a page nor an image", hint="name it .html, .png, .svg or .pdf")
    check_place(path)


def check_plotly() -> None:
    """Raise ImpossiblePlan where plotly is absent."""
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError as error:
        raise ImpossiblePlan("plotly is not installed here, and it draws the page", hint=NO_PLOTLY) from error


def write(shown: "Figure", path: Path, *, title: str, above: str = "") -> None:
    """Write the figure as what the file's name says. ``above``: HTML that a page shows above it, safe already."""
    if path.suffix.lower() in PAGES:
        write_bytes(path, page(shown, title, above=above).encode("utf-8", errors="replace"))
    else:
        write_bytes(path, _image(shown, path.suffix.lower()[1:]))


def page(shown: "Figure", title: str, *, above: str = "") -> str:
    """The page: plotly's own script is in it, about 5 MB. ``above``: HTML to stand above the figure, safe already."""
    config = {
        "displaylogo": False,
        "responsive": True,
        "toImageButtonOptions": {"filename": "dsdoctor", "scale": 2},
    }
    plot: str = shown.to_html(full_html=False, include_plotlyjs=True, div_id=DIV, config=config)
    before, _, after = PAGE.replace("@title@", html.escape(title)).replace("@div@", DIV).partition("@plot@")
    return before + above + plot + after


def _image(shown: "Figure", kind: str) -> bytes:
    """An image, drawn by Chrome by way of kaleido."""
    height = shown.layout.height
    scale = max(min(SHARPNESS, MOST_PIXELS / height), 1)
    try:
        image: bytes = shown.to_image(format=kind, width=WIDTH, height=height, scale=scale)
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise ImpossiblePlan(f"no image could be drawn: {said}", hint=NO_IMAGE) from error
    return image
