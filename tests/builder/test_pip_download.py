"""What is said while pip fetches: a pip that prints what the real one does, and the real one once."""

import sys
import zipfile
from pathlib import Path

import pytest

from dsdoctor.builder.toolkit.download import download_wheels
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.host import LocalHost

PLAYER = """#!/bin/sh
case "$*" in
  *--version*) echo "pip {version} from /x (python 3.11)";;
  *raw*) echo "Collecting nvidia-x"
    echo "  Downloading https://host/nvidia_x-1-py3-none-any.whl (2.0 MB)"
    echo "Progress 0 of 2000000"; echo "Progress 2000000 of 2000000"
    {end};;
  *) echo "quiet" > {folder}/quiet; {end};;
esac
"""


def player(folder: Path, version: str, end: str = "exit 0") -> str:
    python = folder / "python"
    python.write_text(PLAYER.format(version=version, folder=folder, end=end))
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(("version", "figures"), [("24.1", True), ("26.3", True), ("23.0.1", False)])
def test_a_pip_that_tells_figures_is_asked_for_them(version: str, figures: bool, tmp_path: Path) -> None:
    said: list[str] = []

    download_wheels(LocalHost(), ["nvidia-x"], tmp_path, python=player(tmp_path, version), hint="", say=said.append)

    assert [line.partition(" (")[0] for line in said] == (
        ["nvidia_x-1-py3-none-any.whl: 2.0 of 2.0 MB"] if figures else []
    )
    assert (tmp_path / "quiet").exists() is not figures


def test_a_fetch_that_fails_says_why(tmp_path: Path) -> None:
    python = player(tmp_path, "26.3", "echo 'ERROR: No matching distribution found for nvidia-x'; exit 1")

    with pytest.raises(BuildFailed, match="pip could not fetch nvidia-x: ERROR: No matching distribution"):
        download_wheels(LocalHost(), ["nvidia-x"], tmp_path, python=python, hint="", say=print)


@pytest.mark.slow
def test_the_real_pip_is_understood(tmp_path: Path) -> None:
    made = tmp_path / "index"
    made.mkdir()
    info = "part-1.dist-info"
    with zipfile.ZipFile(made / "part-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: part\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    host = LocalHost(env={**LocalHost().environment(), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(made)})

    (found,) = download_wheels(host, ["part"], tmp_path / "into", python=sys.executable, hint="", say=print)

    assert found.name == "part-1-py3-none-any.whl"
