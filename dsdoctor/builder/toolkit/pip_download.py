"""Wheels of PyPI as files in a folder, fetched by pip, with the bytes and the speed as they come."""

import re
from collections.abc import Sequence
from pathlib import Path

from dsdoctor.builder.toolkit.download import Meter, Say
from dsdoctor.core.host import LocalHost
from dsdoctor.core.pip import failed_fetch, pip_for, run_pip, why_failed

FIRST_WITH_FIGURES = (24, 1)
"""``--progress-bar raw`` is known since this pip: it prints figures, and not only to a terminal."""

QUIET = ("--quiet", "--disable-pip-version-check")


def download_wheels(
    host: LocalHost, requirements: Sequence[str], into: Path, *, python: str, hint: str, say: Say
) -> tuple[Path, ...]:
    """The wheels of requirements and of what they need, each compared by pip with its index's digest. Raises BuildFailed."""
    what = ", ".join(requirements)
    pip, _ = pip_for(host, python, what)
    version = parse_pip_version(host.run([*pip, "--version"], timeout=60).stdout)
    wanted = ["--only-binary=:all:", "--dest", str(into), *requirements]
    if version < FIRST_WITH_FIGURES:
        run_pip(host, python, ["download", *QUIET, *wanted], what=what, hint=hint)
    else:
        _with_figures(host, [*pip, "download", "--disable-pip-version-check", *wanted], what=what, hint=hint, say=say)
    return tuple(sorted(into.glob("*.whl")))


def parse_pip_version(text: str) -> tuple[int, int]:
    """What ``pip --version`` says; (0, 0) where it says nothing.

    >>> parse_pip_version("pip 25.3 from /env/lib/python3.12/site-packages/pip (python 3.12)")
    (25, 3)
    """
    found = re.match(r"pip (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _with_figures(host: LocalHost, argv: Sequence[str], *, what: str, hint: str, say: Say) -> None:
    lines: list[str] = []
    name = what
    meter: Meter | None = None

    def on_line(line: str) -> None:
        nonlocal name, meter
        line = line.strip()
        if figures := re.fullmatch(r"Progress (\d+) of (\d+)", line):
            meter = meter or Meter(say, name, int(figures[2]))
            meter.at(int(figures[1]))
            return
        if begun := re.match(r"Downloading (?:\S*/)?(\S+)", line):
            name, meter = begun[1], None
        lines.append(line)

    argv = [*argv, "--progress-bar", "raw"]
    status = host.stream(argv, cwd=Path.cwd(), env=host.environment(), on_line=on_line)
    if status:
        said = "\n".join(lines)
        raise failed_fetch(f"pip could not fetch {what}: {why_failed(host, said)}", said, hint)
