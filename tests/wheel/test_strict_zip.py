"""Wheels as people publish them, of each tool that makes them: the strict reader reads all, as zipfile does."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dsdoctor.core.zip_file import read_bytes, read_entries

pytestmark = [pytest.mark.wheel, pytest.mark.exhaustive]
PROJECTS = (
    "setuptools", "pip", "wheel", "flit-core", "hatchling", "poetry-core", "pdm-backend", "orjson", "ruff", "numpy",
    "protobuf", "packaging", "msgspec", "psutil", "pyyaml", "ninja", "cmake", "safetensors", "tokenizers", "markupsafe",
    "cryptography", "pillow",
)  # fmt: skip
"""Made by setuptools, flit, hatchling, poetry, pdm, maturin, meson, scikit-build and Bazel; some mended by auditwheel."""


def test_wheels_of_every_tool_are_read(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(tmp_path)]
    subprocess.run([*pip, *PROJECTS], check=True)
    wheels = sorted(tmp_path.glob("*.whl"))

    assert len(wheels) == len(PROJECTS)
    for wheel in wheels:
        with wheel.open("rb") as file, zipfile.ZipFile(wheel) as archive:
            found = {entry.name: sum(map(len, read_bytes(file, entry))) for entry in read_entries(file)}
            assert found == {info.filename: info.file_size for info in archive.infolist()}, wheel.name
