"""Nothing that a log says becomes a program, a host, an option or shell in a command that is printed for it."""

import re
from pathlib import Path

import pytest

from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.diagnosis.findings import values_of, values_of_step
from dsdoctor.diagnosis.models import Facts
from dsdoctor.rules import book
from tests.core.test_fix import HOSTILE, harm

PLAIN_LIES = ("evil.example", "/tmp/evil", "evil-pkg", "6.6.6.6")
"""They have the form of what they pretend to be."""
DERIVED = {"torch_requirement", "torch_index"}
"""Made of a version by us; the index is PyTorch's own."""
OPENS_OR_RUNS = re.compile(
    r"\b(?:ssh|scp|pdsh -w|ssh-copy-id|ssh-keyscan -H|ping -c \d|getent hosts|python|chmod \+x|bash|sh|pip install|pip download)"
    r" +(?:-\S+ +)*\S*(?:evil|6\.6\.6)"
)


def printed(lie: str) -> list[str]:
    """Every command of every rule for logs, in which each place of a log holds this."""
    lines = []
    for rule in RULES.values():
        for signature in rule.signatures:
            steps = book.steps_of({"steps": rule.steps if signature.steps is None else signature.steps})
            for step in steps:
                named = dict.fromkeys(re.findall(r"\{(\w+)", step.template), lie)
                if named:
                    values = values_of({name: lie for name in named if name not in DERIVED}, Facts(), lie)
                    lines.append(step.filled(values_of_step(step.template, values)).line)
    return list(dict.fromkeys(lines))


@pytest.mark.parametrize("lie", PLAIN_LIES)
def test_a_log_names_no_host_no_program_and_no_package_to_use(lie: str) -> None:
    lines = printed(lie)

    assert len(lines) > 40
    assert any(lie in line for line in lines)
    assert [line for line in lines if OPENS_OR_RUNS.search(line)] == []


@pytest.mark.slow
def test_no_value_of_a_hostile_log_becomes_shell(tmp_path: Path) -> None:
    lines = sorted({line for lie in HOSTILE for line in printed(lie)})

    assert harm(lines, tmp_path) == []
    assert [line for line in lines if "touch P" in line] == []
