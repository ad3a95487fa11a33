"""The corpora by which `diagnose` is judged: every log has its answer, and says nothing of the machine it was made on."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from tests.diagnosis.score import score
from tests.each import each

HERE = Path(__file__).parent
MACHINE = re.compile(rb"/opt/(venv|wt-)|/work/|[.]pyenv|pypi|/simple/")


@each("corpus", ["real", "blind", "fresh", "later", "threads", "unseen", "unseen_second", "unseen_third"])
def test_every_log_has_one_answer_and_every_answer_its_log(corpus: str) -> None:
    answers = json.loads((HERE / corpus / "answers.json").read_text(encoding="utf-8"))
    files = [answer["file"] for answer in answers]
    assert sorted(files) == sorted(log.name for log in (HERE / corpus).glob("*.log"))
    assert all((answer["cause"] is None) == (answer["category"] == "healthy") for answer in answers)


@each("corpus", ["real", "blind", "fresh", "later", "threads", "unseen", "unseen_second", "unseen_third"])
def test_no_log_names_the_machine_it_was_made_on(corpus: str) -> None:
    told = [log.name for log in (HERE / corpus).glob("*.log") if MACHINE.search(log.read_bytes())]
    assert told == []


def test_the_halves_follow_from_the_names_and_each_failure_can_be_scored() -> None:
    for answer in json.loads((HERE / "blind" / "answers.json").read_text(encoding="utf-8")):
        even = int(hashlib.sha256(answer["file"].encode()).hexdigest(), 16) % 2 == 0
        assert answer["half"] == ("open" if even else "closed")
        assert answer["cause"] is None or (answer["accept"] and all(words and all(words) for words in answer["accept"]))


def test_what_the_last_set_showed_stays_mended() -> None:
    counts, names = score(HERE / "unseen_third", "open")

    assert {mark: names[mark] for mark in names if mark != "right"} == {}
    assert sum(count["right"] for count in counts.values()) == 60
