"""Every example in a docstring is true."""

import doctest
import importlib
from pathlib import Path

import pytest

import dsdoctor
from tests.each import each

ROOT = Path(dsdoctor.__file__).parent
NAMES = [
    ".".join(["dsdoctor", *path.relative_to(ROOT).with_suffix("").parts])
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@each("name", NAMES)
@pytest.mark.slow
def test_examples(name: str) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    for found in doctest.DocTestFinder().find(importlib.import_module(name)):
        # before any docstring that it runs, doctest asks for the age of every file that was ever shown
        if found.examples:
            runner.run(found)

    assert runner.tries > 0
    assert runner.failures == 0
