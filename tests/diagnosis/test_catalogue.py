"""Every signature matches its own sample and no other rule's; every rule can be said; the ids are for good."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.core.finding import FIELD
from dsdoctor.diagnosis import combined
from dsdoctor.diagnosis.catalogue import RULES, TOPICS, Rule, Signature, Tier
from dsdoctor.diagnosis.combined import BUILT_OTHERWISE
from dsdoctor.diagnosis.diagnose import diagnosis_of
from dsdoctor.diagnosis.findings import ANOTHER_PACKAGE, UNEXPLAINED, book_steps, values_of
from dsdoctor.diagnosis.models import Facts, Hit
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.rules.book import fill, room_rules, steps_of
from dsdoctor.rules.store import LOGS
from tests.diagnosis.reading import scan

IDS = (Path(__file__).parent / "rules.txt").read_text(encoding="utf-8").split()

ROOM = Path(combined.__file__).parent
EXTRA_CASES = {
    ANOTHER_PACKAGE,
    *BUILT_OTHERWISE,
    *UNEXPLAINED.values(),
    "one-of-several",
    "other-processes",
    "another-process",
}
WORDINGS = [(rule, signature) for rule in RULES.values() if not rule.general for signature in rule.signatures]


@pytest.fixture(scope="module")
def scans() -> list[tuple[Rule, Signature, Scan]]:
    """Each wording with its sample, read once."""
    return [(rule, signature, scan(signature.sample.splitlines())) for rule, signature in WORDINGS]


def test_the_rules_are_those_of_the_field() -> None:
    assert sorted(RULES) == IDS


def test_no_id_is_used_twice() -> None:
    assert sum(len(topic["rule"]) for topic in TOPICS.values()) == len(RULES)


@pytest.mark.slow
def test_a_wording_matches_its_own_sample_and_no_other_rule_does(scans: list[tuple[Rule, Signature, Scan]]) -> None:
    for rule, signature, read in scans:
        hits = read.hits.values()

        assert signature in [hit.signature for hit in hits], (rule.id, signature.sample)
        assert {hit.rule.id for hit in hits} == {rule.id}, signature.sample


def test_the_texts_of_a_wording_can_be_filled_from_its_sample(scans: list[tuple[Rule, Signature, Scan]]) -> None:
    for rule, signature, read in scans:
        hit = next(hit for hit in read.hits.values() if hit.signature is signature)
        values = values_of(hit.groups, Facts(), hit.op)
        templates = (signature.title or rule.title, signature.fix or rule.fix)
        texts = [fill(template, values) for template in templates]
        places = [found for template in templates for found in FIELD.finditer(template)]
        lines = rule.steps if signature.steps is None else signature.steps
        commands = [step.filled(values).line for step in steps_of({"steps": lines})]

        assert all(text and text[0] != " " for text in texts), rule.id
        if signature.tier < Tier.ECHO and rule.id != "op-silently-skipped":
            assert {found["name"] for found in places if found["without"] is None} <= set(values), (
                rule.id,
                texts,
                commands,
            )


def test_a_rule_has_a_manual_page_and_refers_to_rules_that_are() -> None:
    for rule, table in room_rules(LOGS).items():
        assert 1 <= len(table["means"].splitlines()) <= 8, rule
        assert 1 <= len(table["matters"].splitlines()) <= 4, rule
        assert set(RULES[rule].explained_by) <= set(RULES), rule


@pytest.mark.slow
def test_a_cause_is_diagnosed_from_its_sample_alone(scans: list[tuple[Rule, Signature, Scan]]) -> None:
    for rule, signature, read in scans:
        if signature.tier <= Tier.GENERIC:
            finding = diagnosis_of(replace(read)).findings[0]

            assert finding.rule == rule.id
            assert finding.evidence[0].startswith(f"line {len(signature.sample.splitlines())}: "), rule.id


def test_patterns_have_no_unbounded_gap() -> None:
    for rule, signature in WORDINGS:
        patterns = signature.pattern + signature.unless + signature.after

        assert re.findall(r"(?<![\\\w])\.[*+]", patterns) == [], rule.id


def named_cases() -> set[str]:
    """The cases that the room's code names."""
    nodes = [node for path in ROOM.glob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    given = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "case"]
    given += [call.args[0] for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "in_case"]
    constants = [one.value for node in given for one in ast.walk(node) if isinstance(one, ast.Constant)]
    return {one for one in constants if isinstance(one, str)} | EXTRA_CASES


def test_every_case_of_a_log_rule_is_named_and_every_named_one_is_a_case() -> None:
    cases = {case.name for rule in RULES.values() for case in rule.cases}
    of_the_room = {case["name"] for table in room_rules("diagnosis").values() for case in table.get("case", ())}
    of_checks = {"skipped", "sinking"}
    by_the_book = {case.name for rule in RULES.values() for case in rule.cases if case.where}

    assert len(by_the_book) >= 10
    assert cases - of_checks - by_the_book - named_cases() == set()
    assert named_cases() - cases - of_the_room - of_checks - {""} == set()


def test_a_case_changes_what_it_says_and_nothing_else() -> None:
    rule = RULES["argument-not-known"]
    own = rule.signatures[0]
    hit = Hit(rule=rule, signature=own, line=1, text="", groups={}).in_case("one-package")

    assert hit.signature.title == f"{own.title or rule.title}; {{caller}} makes the call, at {{call}}"
    assert hit.signature.steps == ("python -m pip show {caller}",)
    assert replace(hit.signature, title=own.title, fix=own.fix, steps=own.steps) == own
    with pytest.raises(StopIteration):
        hit.in_case("nobody-wrote-this")


def test_a_wording_without_steps_has_none() -> None:
    rule = RULES["dataset-unreadable"]
    none, own = (replace(rule.signatures[0], steps=steps) for steps in ((), None))

    assert book_steps(Hit(rule=rule, signature=none, line=1, text="", groups={})) == ()
    assert book_steps(Hit(rule=rule, signature=own, line=1, text="", groups={})) == rule.steps != ()
