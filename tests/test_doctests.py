"""Every example in a docstring is true."""

import doctest
import importlib
from pathlib import Path

import dsdoctor
from tests.each import each

ROOT = Path(dsdoctor.__file__).parent
NAMES = [
    ".".join(["dsdoctor", *path.relative_to(ROOT).with_suffix("").parts])
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@each("name", NAMES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)

    assert result.attempted > 0
    assert result.failed == 0
