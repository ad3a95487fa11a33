"""The screens: at any width of any recorded machine they fit, name few problems, and end in one next step."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from dsdoctor.builder.check import check
from dsdoctor.builder.checked import Checked, check_lines, ending_lines, issue_lines, missed_ops, next_step
from dsdoctor.checks import Examined
from dsdoctor.core.finding import Finding, Severity, alternative, step
from dsdoctor.core.requests import CheckRequest
from dsdoctor.ui.screen import first_step, most_harmful, screen_lines
from dsdoctor.ui.terminal import COMMAND, show

MACHINES = sorted((Path(__file__).parents[1] / "machines").glob("*.json"))
TITLE = re.compile(r"^[✗!·] (?:.|\n )*?  ?\s*\[[a-z0-9-]+\]$", re.MULTILINE)


def checked(machine: Path) -> Checked:
    return check(CheckRequest(python="/none", machine=machine), say=print)


def screen(done: Checked, width: int, *, verbose: bool = False, encoding: str = "utf-8") -> str:
    """What a terminal of that width shows."""
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, errors="replace")
    lines = [*check_lines(done, verbose=verbose), *ending_lines(next_step(done))]
    show(Console(file=out, force_terminal=True, no_color=True, width=width, color_system=None), lines)
    out.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda path: path.stem)
def test_a_check_fits_names_every_error_and_three_problems_and_ends_in_one_step(machine: Path) -> None:
    done = checked(machine)
    errors = sum(finding.severity is Severity.ERROR for finding in done.findings)
    bad = [finding for finding in done.findings if finding.severity is not Severity.NOTE]
    for width in (60, 80, 120):
        shown = screen(done, width)
        lines = shown.splitlines()
        told = TITLE.findall(shown)

        assert [line for line in lines if len(line) > width and not COMMAND.match(line) and " " in line.strip()] == []
        assert len(told) == max(min(len(bad), 3), errors)
        assert ("no problems found" in shown) == (not bad and not missed_ops(done.ops))
        assert not ("no problems found" in shown and "✗" in shown)
        assert "deepspeed_not_implemented" not in shown
        assert sum(line.startswith("  next: $ ") for line in lines) == (next_step(done) is not None)
        assert lines[-1].startswith("  next: $ ") or "no problems found" in lines[-1]


@pytest.mark.parametrize("name", ["container-without-gpu", "one-toolkit"])
def test_all_words_of_a_wide_screen_are_on_a_narrow_one(name: str) -> None:
    done = checked(next(path for path in MACHINES if path.stem == name))

    assert screen(done, 40, verbose=True).split() == screen(done, 500, verbose=True).split()


def test_without_our_marks_the_letters_differ() -> None:
    done = checked(next(path for path in MACHINES if path.stem == "container-without-gpu"))

    shown = screen(done, 80, encoding="ascii").splitlines()

    assert {line.split(" ")[0] for line in shown} >= {"ok", "!!", "XX", "--"}
    assert not any("?" in line for line in shown)


def test_the_worst_is_first_and_the_rest_is_counted_with_the_option_that_shows_it() -> None:
    found = [
        Finding.note("n", "a note"),
        Finding.warning("w", "a warning", affects=("a", "b")),
        Finding.error("few", "an error", affects=("a",)),
        Finding.error("many", "an error", affects=("a", "b")),
        Finding.error("everything", "an error"),
    ]

    assert [finding.rule for finding in most_harmful(found)] == ["everything", "many", "few", "w", "n"]
    assert list(screen_lines(found, shows_all="-v"))[-1] == "· and 1 warning, 1 note: w, n (-v shows all)"
    assert sum("[" in line for line in screen_lines(found)) == 5


def test_every_error_is_shown_and_warnings_are_counted() -> None:
    found = [Finding.warning("w", "a warning"), *(Finding.error(f"e{number}", "an error") for number in range(9))]

    lines = list(screen_lines(found, shows_all="-v"))

    assert [rule for rule in (f"[e{number}]" for number in range(9)) if not any(rule in line for line in lines)] == []
    assert lines[-1] == "· and 1 warning: w (-v shows all)"
    same = [Finding.error("rank-raised", f"rank {rank}") for rank in range(1000)]
    assert list(screen_lines([*same, *found], shows_all="-v"))[-1] == (
        "· and 980 errors, 1 warning: rank-raised, w (-v shows all)"
    )


def test_the_first_step_is_a_command_that_stands_for_itself() -> None:
    steps = (step("export A={a}", a="1"), step("make"), alternative("conda install x"))

    assert first_step([Finding.warning("w", "t", fix="do it", steps=steps)]) == steps[0]
    assert str(first_step([Finding.error("no-steps", "t", fix="think")]).line) == "python -m dsdoctor explain no-steps"
    assert first_step([Finding.note("n", "t", fix="f", steps=steps)]) is None


def test_steps_are_joined_by_words() -> None:
    steps = (step("first"), step("second"), alternative("third"))
    lines = list(screen_lines([Finding.error("r", "t", fix="f", steps=steps)]))

    assert lines[-3:] == ["      $ first", " then $ second", "   or $ third"]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda path: path.stem)
def test_a_report_for_an_issue_has_thirty_lines_at_most_and_every_problem(machine: Path) -> None:
    done = checked(machine)

    lines = list(issue_lines(done, {}))

    assert len(lines) <= 30
    assert not any("\n" in line or re.search(r"(?<!\\)<", line) for line in lines)
    bad = {finding.rule for finding in done.findings if finding.severity is not Severity.NOTE}
    assert {rule for rule in bad if f"`{rule}`" in "\n".join(lines)} == bad


def test_a_report_for_an_issue_names_nobody() -> None:
    evidence = ("/home/alice_b/t/x.so", "https://u:hf_S3cretWord@host/simple", "/scratch/alice_b/env")
    one = [Finding.error(f"r{place}", f"bad: {said}", evidence=(said,)) for place, said in enumerate(evidence)]
    topic = Examined(topic="t", summary="in /home/alice_b/env", findings=tuple(one))
    done = Checked(machine=checked(MACHINES[0]).machine, topics=(topic,), ops=(), source=None)
    environment = {"HOME": "/home/alice_b", "USER": "alice_b", "PIP_INDEX_URL": "https://u:hf_S3cretWord@host/simple"}

    said = "\n".join(issue_lines(done, environment))

    assert "alice" not in said
    assert "S3cret" not in said
    assert "/scratch/USER/env" in said
