"""The manual pages: every rule has one, in four parts."""

import json

import pytest

from dsdoctor.cli.explain import fix_commands, pages
from dsdoctor.core.finding import Finding
from dsdoctor.core.release import ADDRESS
from dsdoctor.core.text import decode, encode
from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.rules import book
from dsdoctor.rules.book import entries, rule_ids
from tests.cli.runner import run
from tests.each import each


@each("rule", rule_ids())
@pytest.mark.slow
def test_a_page_says_what_it_means_why_it_matters_how_to_fix_it_and_since_when(rule: str) -> None:
    found = list(pages(rule))

    assert len(found) == len(list(entries(rule))) >= 1
    for where, page in found:
        assert len(page.means) > 20, where
        assert len(page.why) > 20, where
        assert len(page.fix) > 10, where
        assert page.since.count(".") == 1, where


@pytest.mark.slow
def test_a_page_shows_every_command_of_a_log_rules_fix_and_which_is_another_way() -> None:
    for rule in RULES.values():
        steps = book.steps_of({"steps": rule.steps})
        fix = "\n".join(page.fix for _, page in pages(rule.id)) if steps else ""
        for step in steps:
            assert f"$ {step.printed}" in fix
            assert step.line in " ".join(fix_commands(rule.id))


def test_explain_and_findings_lead_to_the_same_page() -> None:
    told = json.loads(run("explain", "cuda-home-wrong", "--json").stdout)
    found = Finding.error("cuda-home-wrong", "t")

    assert told["url"] == found.url == f"{ADDRESS}rules/cuda-home-wrong/"
    assert 'export CUDA_HOME="$(python -m dsdoctor toolkit)"' in told["fixes"]
    assert json.loads(encode(found))["url"] == found.url


def test_a_finding_that_another_version_wrote_is_read_with_its_address() -> None:
    told = {**json.loads(encode(Finding.error("a-rule", "t"))), "fix": None}
    del told["url"]

    assert decode(json.dumps(told), Finding) == Finding.error("a-rule", "t")
    assert decode(json.dumps(told), Finding).url == Finding.error("a-rule", "t").url


def test_the_id_of_a_rule_that_was_merged_leads_to_the_rule_it_is_in() -> None:
    told = json.loads(run("explain", "data-worker-gone", "--json").stdout)

    assert (told["rule"], told["formerly"]) == ("data-worker-failed", "data-worker-gone")
    assert told["url"] == f"{ADDRESS}rules/data-worker-failed/"
    assert run("explain", "data-worker-gone").stdout.startswith("data-worker-failed (formerly data-worker-gone)\n")


def test_an_id_that_went_for_good_says_so() -> None:
    done = run("explain", "notebook-launch")

    assert done.returncode == 2
    assert "notebook-launch is no longer a rule" in done.stderr
