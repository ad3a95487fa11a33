"""Mistakes that users posted are named with their keys; what --fix makes of them brings no new one; what is published is well."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.config.answer import ConfigContext, Verdict
from dsdoctor.config.document import correct
from dsdoctor.config.judge import corrections_of, judge
from dsdoctor.core.finding import Severity
from tests.config.many import ask_many
from tests.config.posted import Posted, posted
from tests.config.public import PUBLIC

pytestmark = pytest.mark.launch  # needs DeepSpeed


def judged(cases: list[Posted], folder: Path) -> list[tuple[Verdict, ...]]:
    """The verdicts on each, all asked of one process."""
    files = []
    for number, case in enumerate(cases):
        file = folder / f"{number}.json"
        file.write_text(json.dumps(case.arguments))
        files.append(str(file) if case.arguments else "")
    asked = ask_many([case.config for case in cases], arguments=files, worlds=[case.world for case in cases])
    by = ["transformers" if case.arguments else "" for case in cases]
    return [
        judge(ConfigContext(config=case.config, asked=answer, filled_by=who))
        for case, answer, who in zip(cases, asked, by, strict=True)
    ]


def errors(found: tuple[Verdict, ...]) -> set[str]:
    return {verdict.finding.title for verdict in found if verdict.finding.severity is Severity.ERROR}


PUBLISHED = [Posted(what=what, config=config, named={}, arguments=given) for what, (config, given) in PUBLIC.items()]
TRUE_OF_THEM = {"config-auto-dropped", "config-auto-for-trainer", "config-key-deprecated"}
"""What is so in some that are published, and stops nobody."""


def test_mistakes_are_named_corrections_bring_no_new_ones_and_what_is_published_is_not_alarmed(tmp_path: Path) -> None:
    cases = list(posted())
    every = judged([*cases, *PUBLISHED], tmp_path)
    found, of_published = every[: len(cases)], every[len(cases) :]

    unnamed = [
        (case.what, key, rule)
        for case, verdicts in zip(cases, found, strict=True)
        for key, rule in case.named.items()
        if not any(v.finding.rule == rule and key in f"{v.finding.title} {v.finding.evidence}" for v in verdicts)
    ]
    assert len(cases) >= 25
    assert unnamed == []

    said = {
        (case.what, v.finding.rule)
        for case, verdicts in zip(PUBLISHED, of_published, strict=True)
        for v in verdicts
        if v.finding.severity is not Severity.NOTE
    }
    assert len(PUBLISHED) >= 12
    assert {(what, rule) for what, rule in said if rule not in TRUE_OF_THEM} == set()

    corrected = [
        replace(case, config=json.loads(correct(json.dumps(case.config), case.config, made, plain_json=True).text))
        for case, verdicts in zip(cases, found, strict=True)
        if (made := tuple(corrections_of(verdicts)))
    ]
    before = {case.what: errors(verdicts) for case, verdicts in zip(cases, found, strict=True)}
    after = {case.what: errors(verdicts) for case, verdicts in zip(corrected, judged(corrected, tmp_path), strict=True)}
    assert len(corrected) >= 7
    assert {what: left for what, left in after.items() if left - before[what] or left == before[what]} == {}
