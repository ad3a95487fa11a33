"""Mistakes that users posted are named, each with its key; what --fix makes of them says nothing new that is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.config.correct import correct
from dsdoctor.config.judge import corrections_of, judge
from dsdoctor.config.question import Question, Verdict
from dsdoctor.core.finding import Severity
from tests.config.many import ask_many
from tests.config.posted import Posted, posted

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
        judge(Question(config=case.config, asked=answer, filled_by=who))
        for case, answer, who in zip(cases, asked, by, strict=True)
    ]


def errors(found: tuple[Verdict, ...]) -> set[str]:
    return {verdict.finding.title for verdict in found if verdict.finding.severity is Severity.ERROR}


def test_each_is_named_and_corrections_bring_no_new_error(tmp_path: Path) -> None:
    cases = list(posted())
    found = judged(cases, tmp_path)

    unnamed = [
        (case.what, key, rule)
        for case, verdicts in zip(cases, found, strict=True)
        for key, rule in case.named.items()
        if not any(v.finding.rule == rule and key in f"{v.finding.title} {v.finding.evidence}" for v in verdicts)
    ]
    assert len(cases) >= 25
    assert unnamed == []

    corrected = [
        replace(case, config=json.loads(correct(json.dumps(case.config), case.config, made, plain_json=True).text))
        for case, verdicts in zip(cases, found, strict=True)
        if (made := tuple(corrections_of(verdicts)))
    ]
    before = {case.what: errors(verdicts) for case, verdicts in zip(cases, found, strict=True)}
    after = {case.what: errors(verdicts) for case, verdicts in zip(corrected, judged(corrected, tmp_path), strict=True)}
    assert len(corrected) >= 10
    assert {what: left for what, left in after.items() if left - before[what] or left == before[what]} == {}
