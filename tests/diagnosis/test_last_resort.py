"""A part of a log that dsdoctor itself cannot read is said, with its line, and the rest of the verdict stands."""

from dataclasses import replace

import pytest

from dsdoctor.core.finding import Finding
from dsdoctor.diagnosis.catalogue import RULES, Rule
from dsdoctor.diagnosis.diagnose import diagnose
from dsdoctor.diagnosis.models import Diagnosis
from dsdoctor.diagnosis.scan import Patterns, index
from tests.diagnosis.mangled import mangled
from tests.diagnosis.without_rules import broken, some_rules
from tests.each import each

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
MISSING = RULES["cuda-header-missing"]
HEADER = "x.h:6:10: fatal error: cusparse.h: No such file or directory"


def with_rule(rule: Rule) -> Patterns:
    """The catalogue with this rule in the place of the one with its id."""
    return Patterns(index([*(one for one in RULES.values() if one.id != rule.id), rule]))


def failed(diagnosis: Diagnosis) -> Finding:
    return next(finding for finding in diagnosis.findings if finding.rule == "reader-failed")


def test_a_line_that_cannot_be_searched_is_named_and_the_others_are_read() -> None:
    broken_pattern = replace(MISSING, signatures=(replace(MISSING.signatures[0], pattern="fatal error: ("),))

    diagnosis = diagnose(["a", HEADER, "b", OOM], patterns=with_rule(broken_pattern))

    assert [finding.rule for finding in diagnosis.findings][:1] == ["gpu-oom"]
    assert "at line 2" in failed(diagnosis).title
    assert "unterminated subpattern" in failed(diagnosis).evidence[0]


def test_a_cause_that_cannot_be_told_leaves_the_line_of_the_failure() -> None:
    broken_title = replace(MISSING, title=7, signatures=MISSING.signatures)  # type: ignore[arg-type]

    diagnosis = diagnose(["a", HEADER], patterns=with_rule(broken_title))

    assert [finding.rule for finding in diagnosis.findings] == ["unexplained-failure", "reader-failed"]
    assert f"line 2: {HEADER}" in diagnosis.findings[0].evidence
    assert diagnosis.lines == 2


def test_what_is_no_line_ends_nothing() -> None:
    diagnosis = diagnose(["step 1", 7, OOM])  # type: ignore[list-item]

    assert diagnosis.findings[0].rule == "gpu-oom"
    assert "at line 2" in failed(diagnosis).title


def test_a_part_of_a_json_log_is_named_by_the_line_of_the_file() -> None:
    broken_pattern = replace(MISSING, signatures=(replace(MISSING.signatures[0], pattern="fatal error: ("),))
    log = ['{"log":"a\\nb\\n","stream":"stderr"}', f'{{"log":"{HEADER}\\n","stream":"stderr"}}']

    assert "at line 2;" in failed(diagnose(log, patterns=with_rule(broken_pattern))).title


@each(
    "line",
    [
        "[launch.py:163:main] dist_world_size=1artitioning: 4]",
        "[launch.py:163:main] dist_world_size=4]",
        "torch.OutOfMemoryError: CUDA out of memory. GPU 0 has a total capacity of .. GiB of which .. GiB is free. Process 7 has "
        "1.2.3 GiB memory in use. this process has . GiB memory in use",
    ],
)
def test_what_two_processes_wrote_into_one_line_is_read(line: str) -> None:
    assert not any(finding.rule == "reader-failed" for finding in diagnose([line]).findings)


@pytest.mark.slow
def test_more_mangled_lines_are_read() -> None:
    assert list(broken(mangled(10_000, seed=0), some_rules(1, 0))) == []


@each("seed", range(1, 11))
@pytest.mark.exhaustive
def test_very_many_mangled_lines_are_read(seed: int) -> None:
    assert list(broken(mangled(20_000, seed), some_rules(1, 0))) == []
