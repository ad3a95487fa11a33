"""SECURITY.md promises nothing that no test shows: every test that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_page_names_is_there() -> None:
    missing, file = [], ""
    named = re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", (ROOT / "SECURITY.md").read_text())
    for path, name in named:
        file = path or file
        if f"\ndef {name}(" not in (ROOT / file).read_text():
            missing.append(f"{file}::{name}")

    assert len(named) > 25
    assert missing == []
