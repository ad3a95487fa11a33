"""A document on a terminal: what others wrote is in it, and moves nothing."""

import json
import re
from pathlib import Path

from tests.cli.runner import run
from tests.each import each

STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


@each("mark", ["\x1b[2J", "\x7f", "\x9b2J", "\x9d0;x\x07", "\u200f", "\u202e", "\u2028", "\u2066", "\u061c", "\ufeff"])
def test_a_document_holds_no_character_that_steers_a_terminal(mark: str, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(
        f'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nValueError: no{mark}column\n'
    )

    done = run("diagnose", str(log), "--json")

    assert STEERING.search(done.stdout) is None
    assert "column" in json.dumps(json.loads(done.stdout)["findings"])


def test_what_is_escaped_is_the_same_text_to_whoever_reads_the_document(tmp_path: Path) -> None:
    folder = tmp_path / "a\x9b31m\u202eb"
    folder.mkdir()

    done = run("hang", str(folder), "--json")

    assert STEERING.search(done.stdout) is None
    assert str(folder) in json.dumps(json.loads(done.stdout), ensure_ascii=False)
