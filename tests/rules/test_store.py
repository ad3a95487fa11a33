"""What is derived from the book's files is kept, never used where it is stale, and holds for every line that a pattern matches."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.diagnosis.lines import COLOUR, LONGEST, segments
from dsdoctor.diagnosis.scan import words_of
from dsdoctor.rules.store import FOLDER, INDEX, TABLE, log_table, log_topics, texts_of
from dsdoctor.rules.words import derived_parts, derived_words
from tests.diagnosis.pumped import example_of
from tests.diagnosis.test_wordings import CASES
from tests.each import each

LOGS_OF_THE_FIELD = Path(__file__).parents[1] / "diagnosis"
WORDINGS = [
    wording
    for topic in log_table().values()
    for wording in [
        *(one for rule in topic["rule"] if not rule.get("general") for one in rule["wording"]),
        *topic["regression"],
    ]
]
DERIVED = {wording["pattern"]: derived_words(wording["pattern"]) for wording in WORDINGS}
HINTS = {
    wording["pattern"]: wording["words"]
    for topic in log_topics().values()
    for entry in [*topic["rule"], {"wording": topic.get("regression", ())}]
    for wording in entry.get("wording", ())
    if "words" in wording
}


def has(line: str, words: str) -> bool:
    there = {word.decode() for word in words_of(line.encode())}
    return any(there.issuperset(alternative.split("+")) for alternative in words.split())


@each(
    ("pattern", "words"),
    [
        (r"^RuntimeError: no (?:space|room) left\b", "left+no+room+runtimeerror left+no+runtimeerror+space"),
        (r"out of (?:the )?memory$", "memory+of"),
        (r"`x_y`: \[Errno 13\] ", "13+errno+x_y"),
        (
            r"'a+bc' is ?n(?:o|0)t\s+here, (?P<n>\d+) of them",
            "here+is+n0t+of here+is+not+of here+isn0t+of here+isnot+of",
        ),
        (r"\bab(?:cd)? ", "ab abcd"),
        (r"\w*Error: bad", ""),
        (r"one |x", ""),
        (r" [Tt]he [a-z]+ is [-_]x ", "is+the"),
        (r"(?:no|not) (?!yet)found[.,]", "found"),
        (r"ÄRGER with größe ", "gr+rger+with"),
    ],
)
def test_the_words_of_a_pattern_are_those_that_each_match_has(pattern: str, words: str) -> None:
    example = example_of(pattern)

    assert derived_words(pattern) == words
    assert re.search(pattern, example)
    assert not words or has(example, words), example


def test_every_wording_has_words_and_a_sample_with_them() -> None:
    assert [wording["pattern"] for wording in WORDINGS if not wording["words"]] == []
    for wording in WORDINGS:
        line = wording["sample"].splitlines()[-1]
        found = DERIVED[wording["pattern"]]

        assert not re.search(wording["pattern"], line) or not found or has(line, found), line


def test_a_match_has_one_of_the_parts_of_its_pattern() -> None:
    made = [(pattern, example_of(pattern)) for pattern in DERIVED]
    made += [(wording["pattern"], wording["sample"].splitlines()[-1]) for wording in WORDINGS]
    lines = [(pattern, line) for pattern, line in made if re.search(pattern, line)]
    parts = {wording["pattern"]: wording["parts"].split("\n") for wording in WORDINGS}

    assert sum(some != [""] for some in parts.values()) > 0.95 * len(parts)
    assert [(pattern, line) for pattern, line in lines if not any(part in line for part in parts[pattern])] == []


@each(
    ("pattern", "parts"),
    [
        (r"^no (?:space|room) left", (" left",)),
        (r"(?:the|an?) worker (?:was )?(?:killed|lost)\b", (" worker ",)),
        (r"[Kk]illed by (?:signal|SIG[A-Z]+)", ("illed by ",)),
        (r"(?:error|fault)+: \d", ("error", "fault")),
        (r"(?i:signal)|exited", ()),
        (r"a(?=bcd)ef", ()),
        (r"x{3}|\d+", ()),
    ],
)
def test_the_parts_of_a_pattern_are_those_that_each_match_has(pattern: str, parts: tuple[str, ...]) -> None:
    assert derived_parts(pattern) == parts


def test_words_stand_by_hand_only_where_few_can_be_derived() -> None:
    assert len(HINTS) < len(WORDINGS) / 6


def test_a_line_that_is_made_of_a_pattern_has_the_words_derived_from_it() -> None:
    made = [(example_of(pattern), pattern, found) for pattern, found in DERIVED.items() if found]
    matched = [(example, found) for example, pattern, found in made if re.search(pattern, example)]

    assert len(matched) > 700
    assert [example for example, found in matched if not has(example, found)] == []


@pytest.mark.exhaustive
def test_no_line_of_the_field_matches_a_pattern_without_having_its_words_and_one_of_its_parts() -> None:
    """Every pattern on every line of every log: minutes."""
    logs = [file for file in LOGS_OF_THE_FIELD.rglob("*.log") if file.is_file()]
    raws = {line.encode() for _, log in CASES for line in log} | {
        raw for file in logs for raw in file.read_bytes().splitlines() if len(raw) < LONGEST
    }
    # colours go before a line's words are taken, see Scan.read
    texts = [(text, COLOUR.sub(b"", raw).decode("utf-8", "replace")) for raw in raws for text in segments(raw)]
    parts = {pattern: derived_parts(pattern) for pattern in DERIVED}
    lost = [
        (pattern, text)
        for pattern, words in DERIVED.items()
        if words
        for search in [re.compile(pattern).search]
        for text, line in texts
        if search(text)
        and not (has(line, words) and (not parts[pattern] or any(part in text for part in parts[pattern])))
    ]

    assert lost == []


TABLE_AGAIN = """
import sys
from pathlib import Path
from dsdoctor.rules import store
derived = []
sys.addaudithook(lambda event, given: event == "import" and given[0] == "dsdoctor.rules.words" and derived.append(1))
title = store.log_table()["install"]["rule"][0]["title"]
print(len(derived), title)
"""
EXPLAIN = """
import sys
from dsdoctor.rules import book, store
opened = []
sys.addaudithook(lambda event, given: event == "open" and str(given[0]).endswith((".toml", ".json")) and opened.append(given[0]))
found = [room for room, _ in book.entries(sys.argv[1])]
print(*found, *(name.rpartition("dsdoctor/rules/")[2] for name in map(str, opened)))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The folder of the rules in a copy of the package that holds nothing derived."""
    shutil.copytree(
        FOLDER.parent, tmp_path / "dsdoctor", ignore=shutil.ignore_patterns("*.json", "__pycache__", "*.so")
    )
    return tmp_path / "dsdoctor/rules"


def ask(package: Path, script: str, *arguments: str, keeps: bool = True) -> list[str]:
    env = {"PYTHONPATH": str(package.parent.parent), **({} if keeps else {"PYTHONDONTWRITEBYTECODE": "1"})}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=env, cwd=package, capture_output=True, text=True, check=True).stdout.split()


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.slow
def test_the_table_of_log_rules_is_derived_once(package: Path) -> None:
    first, second = ask(package, TABLE_AGAIN), ask(package, TABLE_AGAIN)

    assert (first[0], second[0]) == ("1", "0")
    assert first[1:] == second[1:]


@pytest.mark.slow
def test_a_stale_table_is_not_used(package: Path) -> None:
    title = ask(package, TABLE_AGAIN)[1]
    text = (package / "logs/install.toml").read_text(encoding="utf-8")
    old = re.search(r'^title = "(\S+)', text, re.MULTILINE)
    assert old and old[1] == title
    # a text of the same length, so that no size tells
    change(package / "logs/install.toml", f'title = "{title}', f'title = "{"X" * len(title)}')

    assert ask(package, TABLE_AGAIN)[:2] == ["1", "X" * len(title)]
    assert ask(package, TABLE_AGAIN)[:2] == ["0", "X" * len(title)]


@pytest.mark.slow
@each("damage", (b"", b"[]", b'{"made_from": "x", "topics": {}}', b"\xff\xfe", b'{"made_from": null'))
def test_a_damaged_table_is_derived_anew(package: Path, damage: bytes) -> None:
    (package / TABLE).write_bytes(damage)

    assert ask(package, TABLE_AGAIN)[0] == "1"
    assert json.loads((package / TABLE).read_bytes())["topics"]


@pytest.mark.slow
def test_words_derived_in_another_way_make_the_table_anew(package: Path) -> None:
    ask(package, TABLE_AGAIN)
    change(package / "words.py", "MAX_SKELETONS = 96", "MAX_SKELETONS = 95")

    assert ask(package, TABLE_AGAIN)[0] == "1"


@pytest.mark.slow
def test_nothing_is_kept_where_python_keeps_nothing(package: Path) -> None:
    ask(package, TABLE_AGAIN, keeps=False)
    ask(package, EXPLAIN, "ssh-unreachable", keeps=False)

    assert list(package.glob("*.json")) == []


@pytest.mark.slow
def test_a_page_is_read_from_the_one_file_that_has_it(package: Path) -> None:
    ask(package, EXPLAIN, "torch-cuda-mismatch")

    assert ask(package, EXPLAIN, "cuda-toolkit-missing") == [
        *("checks", "logs"),
        *("order.toml", INDEX, "checks.toml", "logs/toolkit.toml"),
    ]
    assert ask(package, EXPLAIN, "hang-rank-gone") == ["hang", "order.toml", INDEX, "hang.toml"]


@pytest.mark.slow
def test_a_rule_that_moved_is_found_although_the_index_does_not_know(package: Path) -> None:
    ask(package, EXPLAIN, "hang-rank-gone")
    change(package / "hang.toml", 'id = "hang-rank-gone"', 'id = "hang-rank-new_"')
    change(package / "memory.toml", "[[rule]]\n", '[[rule]]\nid = "hang-rank-gone"\n[[rule]]\n')

    assert ask(package, EXPLAIN, "hang-rank-gone")[0] == "memory"
    assert ask(package, EXPLAIN, "hang-rank-new_")[0] == "hang"


def test_the_index_and_a_search_of_all_files_agree() -> None:
    assert [room for room, _ in texts_of("cuda-toolkit-missing")] == ["checks", "logs"]
    assert texts_of("a-rule-of-nobody") == []
