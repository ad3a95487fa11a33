"""The corpora by which `diagnose` is judged: every log has its answer, and says nothing of the machine it was made on."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from tests.diagnosis.score import CORPORA, score
from tests.each import each

HERE = Path(__file__).parent
MACHINE = re.compile(rb"/opt/(venv|wt-)|/work/|[.]pyenv|pypi|/simple/")


@each("corpus", CORPORA)
def test_every_log_has_one_answer_and_every_answer_its_log(corpus: str) -> None:
    answers = json.loads((HERE / corpus / "answers.json").read_text(encoding="utf-8"))
    files = [answer["file"] for answer in answers]
    assert sorted(files) == sorted(log.name for log in (HERE / corpus).glob("*.log"))
    assert all((answer["cause"] is None) == (answer["category"] == "healthy") for answer in answers)


@each("corpus", CORPORA)
def test_no_log_names_the_machine_it_was_made_on(corpus: str) -> None:
    told = [log.name for log in (HERE / corpus).glob("*.log") if MACHINE.search(log.read_bytes())]
    assert told == []


def test_the_halves_follow_from_the_names_and_each_failure_can_be_scored() -> None:
    for answer in json.loads((HERE / "blind" / "answers.json").read_text(encoding="utf-8")):
        even = int(hashlib.sha256(answer["file"].encode()).hexdigest(), 16) % 2 == 0
        assert answer["half"] == ("open" if even else "closed")
        assert answer["cause"] is None or (answer["accept"] and all(words and all(words) for words in answer["accept"]))


@pytest.mark.slow
def test_what_the_last_set_showed_stays_mended() -> None:
    counts, names = score(HERE / "unseen_third", "open")

    assert {mark: names[mark] for mark in names if mark != "right"} == {}
    assert sum(count["right"] for count in counts.values()) == 60


@pytest.mark.slow
def test_what_the_fourth_set_showed_stays_mended() -> None:
    """Its first score, judged by reading and strictly: 55 of 60 first answers right, and none of 40 healthy logs alarmed.

    Two were half right: flash-attn's build was taken for DeepSpeed's (013), and a GPU that another process filled for one whose
    batch is too large (025). Slurm's cancelling of a step was taken for the cause of what a rank's own exception had ended (059).
    Two were told in the exception's own words only, with no rule: nvc as host compiler (015), and `hostname -I` (032). What is
    unsure still are exceptions of scripts that no rule knows, told with their own words and place.
    """
    counts, names = score(HERE / "unseen_fourth", "open")

    unknown = ["051-trl-gemma3-sft.log", "059-custom-moe-first-save.log"]
    assert {mark: names[mark] for mark in names if mark != "right"} == {"unsure": unknown}
    assert sum(count["right"] for count in counts.values()) == 98
    assert sum(count["quoted"] for count in counts.values()) == len(unknown)


@pytest.mark.slow
def test_what_the_fifth_set_showed_stays_mended() -> None:
    """Its first score, judged by reading and strictly: 36 of 50 right, 11 half, 1 wrong, 2 in own words, 1 of 20 alarmed."""
    counts, names = score(HERE / "unseen_fifth", "open")

    assert {mark: names[mark] for mark in names if mark != "right"} == {}
    assert sum(count["right"] for count in counts.values()) == 70


@pytest.mark.slow
def test_what_the_sixth_set_showed_stays_mended() -> None:
    """Its first score, judged strictly: 59 of 100 right, 24 half, 17 wrong; of 50 healthy ones 6 alarmed, 6 undecided."""
    counts, names = score(HERE / "unseen_sixth", "open")

    assert {mark: names[mark] for mark in names if mark != "right"} == {}
    assert sum(count["right"] for count in counts.values()) == 150


@pytest.mark.slow
def test_what_the_seventh_set_showed_stays_mended() -> None:
    """Its first score, judged strictly: 59 of 102 right, 28 half, 15 wrong; of 50 healthy ones 4 alarmed, 2 undecided."""
    counts, names = score(HERE / "unseen_seventh", "open")

    assert {mark: names[mark] for mark in names if mark != "right"} == {}
    assert sum(count["right"] for count in counts.values()) == 152
