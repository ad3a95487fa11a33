"""Every signature matches its own sample and no other rule's; every rule can be said; the ids are for good."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.diagnosis.catalogue import RULES, TOPICS
from dsdoctor.diagnosis.diagnose import diagnosis_of
from dsdoctor.diagnosis.facts import fill, values_of
from dsdoctor.diagnosis.models import Facts, Rule, Signature, Tier
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.rules.book import room_rules, steps_of
from dsdoctor.rules.store import LOGS
from tests.diagnosis.reading import scan

IDS = (Path(__file__).parent / "rules.txt").read_text(encoding="utf-8").split()

WORDINGS = [(rule, signature) for rule in RULES.values() if not rule.general for signature in rule.signatures]


@pytest.fixture(scope="module")
def scans() -> list[tuple[Rule, Signature, Scan]]:
    """Each wording with its sample, read once."""
    return [(rule, signature, scan(signature.sample.splitlines())) for rule, signature in WORDINGS]


def test_the_rules_are_those_of_the_field() -> None:
    assert sorted(RULES) == IDS


def test_no_id_is_used_twice() -> None:
    assert sum(len(topic["rule"]) for topic in TOPICS.values()) == len(RULES)


def test_a_wording_matches_its_own_sample_and_no_other_rule_does(scans: list[tuple[Rule, Signature, Scan]]) -> None:
    for rule, signature, read in scans:
        hits = read.hits.values()

        assert signature in [hit.signature for hit in hits], (rule.id, signature.sample)
        assert {hit.rule.id for hit in hits if hit.rule is rule or not hit.rule.family} == {rule.id}, signature.sample


def test_the_texts_of_a_wording_can_be_filled_from_its_sample(scans: list[tuple[Rule, Signature, Scan]]) -> None:
    for rule, signature, read in scans:
        hit = next(hit for hit in read.hits.values() if hit.signature is signature)
        values = values_of(hit.groups, Facts(), hit.op)
        texts = [fill(signature.title or rule.title, values), fill(signature.fix or rule.fix, values)]
        lines = rule.steps if signature.steps is None else signature.steps
        commands = [step.filled(values).line for step in steps_of({"steps": lines})]

        assert all(text and text[0] != " " for text in texts), rule.id
        if signature.tier < Tier.ECHO and rule.id != "op-silently-skipped":
            assert not [text for text in [*texts, *commands] if "(unknown)" in text], (rule.id, texts, commands)


def test_a_rule_has_a_manual_page_and_refers_to_rules_that_are() -> None:
    for rule, table in room_rules(LOGS).items():
        assert 1 <= len(table["means"].splitlines()) <= 8, rule
        assert 1 <= len(table["matters"].splitlines()) <= 4, rule
        assert set(RULES[rule].explained_by) <= set(RULES), rule


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
