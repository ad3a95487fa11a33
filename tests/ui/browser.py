"""A page in a real Chromium with the width of a window or of a telephone: what it draws, whether it fits, what a key does."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import choreographer

LOOK = """(() => {
  const shown = e => e.textContent.trim() && e.getBoundingClientRect().width > 0;
  const seen = [...document.querySelectorAll(".plot text")].filter(shown);
  const boxes = seen.map(e => [e, e.getBoundingClientRect()]);
  const said = e => e.textContent.trim().slice(0, 60), overlaps = [], outside = [];
  for (let a = 0; a < boxes.length; a++) {
    const one = boxes[a][1];
    if (one.left < -1 || one.right > innerWidth + 1) { outside.push(said(boxes[a][0])); }
    for (let b = a + 1; b < boxes.length; b++) {
      const two = boxes[b][1];
      const wide = Math.min(one.right, two.right) - Math.max(one.left, two.left);
      const high = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
      if (wide > 2 && high > 3) { overlaps.push([said(boxes[a][0]), said(boxes[b][0])]); }
    }
  }
  const plot = document.querySelector(".plot");
  return JSON.stringify({
    drawn: document.body.dataset.drawn, dark: document.body.className === "dark",
    paper: getComputedStyle(document.body).backgroundColor, asked: document.body.dataset.asked || "",
    scrolls: document.documentElement.scrollWidth > innerWidth, overlaps: overlaps.slice(0, 9), outside: outside.slice(0, 9),
    texts: seen.map(said), words: document.body.innerText, height: plot ? plot.getBoundingClientRect().height : 0,
    filled: plot ? plot.querySelector(".main-svg").getBoundingClientRect().width / innerWidth : 1,
    legend: [...document.querySelectorAll(".legend button")].map(e => [e.textContent, e.getAttribute("aria-pressed")]),
    range: plot ? plot._fullLayout.yaxis.range.map(Number) : [],
    tainted: document.taint || 0, images: document.images.length,
    focused: document.activeElement.id || document.activeElement.className || document.activeElement.tagName,
  });
})()"""


@dataclass(frozen=True, kw_only=True)
class View:
    """How a page is looked at. ``keys``: pressed one after the other, before ``LOOK``; ``shot``: where a picture of it is kept."""

    width: int = 1280
    dark: bool = False
    keys: tuple[str, ...] = ()
    focus: str = ""
    shot: Path | None = None
    name: str = field(default="", compare=False)


def looked_at(page: Path, *views: View) -> list[dict[str, Any]]:
    """What ``LOOK`` tells of each view, in one browser."""
    return asyncio.run(_looked_at(page, views))


async def _looked_at(page: Path, views: tuple[View, ...]) -> list[dict[str, Any]]:
    async with choreographer.Browser(headless=True, enable_sandbox=False) as browser:
        return [await asyncio.wait_for(_look(browser, page, view), 60) for view in views]


async def _look(browser: Any, page: Path, view: View) -> dict[str, Any]:
    tab = await browser.create_tab("about:blank")

    async def do(method: str, **params: Any) -> dict[str, Any]:
        answer = await tab.send_command(method, params=params)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def value(expression: str) -> Any:
        return (await do("Runtime.evaluate", expression=expression))["result"].get("value")

    await do("Emulation.setDeviceMetricsOverride", width=view.width, height=900, deviceScaleFactor=1, mobile=False)
    scheme = "dark" if view.dark else "light"
    await do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    await do("Page.navigate", url=page.absolute().as_uri())
    while await value("document.body && document.body.dataset.drawn") != "yes":
        await asyncio.sleep(0.05)
    if view.focus:
        await value(f"document.querySelector({json.dumps(view.focus)}).focus()")
    for key in view.keys:
        text = {"Enter": "\r", "Space": " "}.get(key, key if len(key) == 1 else "")
        name = " " if key == "Space" else key
        await do(
            "Input.dispatchKeyEvent",
            type="keyDown",
            key=name,
            text=text,
            windowsVirtualKeyCode=9 if key == "Tab" else 0,
        )
        await do("Input.dispatchKeyEvent", type="keyUp", key=name)
    await asyncio.sleep(0.2)
    if view.shot:
        await _shoot(do, value, view)
    found: dict[str, Any] = json.loads(await value(LOOK))
    return found


async def _shoot(do: Any, value: Any, view: View) -> None:
    import base64

    assert view.shot is not None
    clip = {
        "x": 0,
        "y": 0,
        "width": view.width,
        "height": min(3000, await value("document.body.scrollHeight")),
        "scale": 1,
    }
    shot = await do("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    view.shot.write_bytes(base64.b64decode(shot["data"]))
