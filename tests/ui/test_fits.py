"""Every screen at every width of a terminal: no line is wider, no word is cut, and nothing is said that ASCII has not."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.builder.check import check
from dsdoctor.builder.checked import check_lines, ending_lines, next_step, op_lines
from dsdoctor.builder.plan.op_table import OpVerdict
from dsdoctor.checkpoint.folder import look
from dsdoctor.checkpoint.judge import judge as judge_checkpoint
from dsdoctor.checkpoint.loading import Plan
from dsdoctor.checkpoint.text import checkpoint_lines
from dsdoctor.comm.text import phase_line, report_lines, speed_lines
from dsdoctor.config.check import config_lines
from dsdoctor.config.document import ReadConfig
from dsdoctor.config.judge import ConfigJudged
from dsdoctor.core.finding import step
from dsdoctor.core.requests import CheckRequest
from dsdoctor.hang.verdict import hang_lines
from dsdoctor.hang.verdict import judge as judge_hang
from dsdoctor.memory.judge import MemoryReport
from dsdoctor.memory.models import Place
from dsdoctor.memory.predict import changes, overheads_of
from dsdoctor.memory.text import ledger_lines, memory_lines
from dsdoctor.ui.screen import plan_end_lines, plan_lines
from dsdoctor.ui.terminal import COMMAND, MARKS_OF_LINES, in_letters, printable, wrapped
from tests.builder.test_plan import SOURCE, plan
from tests.checkpoint.written import KINDS, write
from tests.cli.runner import run
from tests.comm.reports import bad_pair, good_phases, healthy_2, healthy_4, many, missing_rank, report, slow_node, speed
from tests.config.posted import POSTED
from tests.config.recorded import question, verdicts
from tests.hang.test_page import hanging
from tests.memory.test_changes import situation

HERE = Path(__file__).parents[1]
PLACES: tuple[Place, ...] = ("device", "host")
WIDTHS = range(40, 161)
REPORTS = (healthy_2(), healthy_4(), missing_rank(), slow_node(), bad_pair(), many(2, bad_nodes=True))


def screens(folder: Path) -> Iterator[str]:
    """The lines of screens that are the same at every width."""
    for file in sorted((HERE / "machines").glob("*.json")):
        done = check(CheckRequest(python="/none", machine=file), say=lambda _: None)
        for verbose in (False, True):
            yield from (*check_lines(done, verbose=verbose), *ending_lines(next_step(done)))
    for kind in ("behind", "other"):
        incident = hanging(kind, 8, 3)
        yield from hang_lines(incident, judge_hang(incident))
    write(folder, KINDS[6])
    for broken in (False, True):
        if broken:
            next(folder.rglob("*optim_states.pt")).unlink()
        yield from checkpoint_lines(judge_checkpoint(look(folder), None, Plan()), None)
    for posted in POSTED[::4]:
        asked = question(posted.config).asked
        read = ReadConfig(name="ds_config.json", config=posted.config, text="")
        yield from config_lines(
            ConfigJudged(read=read, asked=asked, verdicts=verdicts(posted.config)), "x.json", verbose=True
        )
    made = plan()
    yield from (*plan_lines(made), *plan_end_lines(made, verbose=True, build=step("python -m dsdoctor build-wheel")))
    for log in sorted((HERE / "diagnosis" / "logs").glob("*.log"))[::12]:
        yield from run("diagnose", str(log), "-v").stdout.splitlines()
    yield from (phase_line(phase) for report in REPORTS for phase in report.phases)


def tables(width: int) -> Iterator[str]:
    """The lines of screens with tables, which go by the width."""
    for shown in REPORTS:
        yield from report_lines(shown, verbose=True, width=width)
    now = replace(situation(2, offload_optimizer="cpu"))
    yield from memory_lines(
        MemoryReport(
            now=now, prediction=now.predicted(), upper=None, overheads=overheads_of(now.predicted().peak.device, world=4),
            changes=changes(now), combined=None, searched=None, searched_upper=None, searched_safe=None, on_node=4,
            host_loading=1 << 34, findings=(),
        ),
        width,
    )  # fmt: skip


def bad(lines: Iterable[str], width: int) -> Iterator[tuple[int, str]]:
    """Lines that are too wide for a terminal with our marks or with ASCII alone, and lines that lost a word."""
    for line in lines:
        for text in dict.fromkeys((line, in_letters(line))):
            parts = wrapped(text, width)
            words = [part.split() for part in parts]
            wide = [part for part, said in zip(parts, words, strict=True) if len(part) > width and not alone(said)]
            if (wide and not COMMAND.match(text)) or " ".join(parts).split() != text.split():
                yield width, text


def alone(words: list[str]) -> bool:
    """Whether it is one word, which nobody can break, beside its mark or its label."""
    return len([word for word in words if word not in MARKS_OF_LINES]) == 1


@pytest.mark.slow
def test_every_screen_fits_every_width_and_no_word_is_cut(tmp_path: Path) -> None:
    same = {printable(line) for line in screens(tmp_path)}
    # each line at every fourth width, its neighbour at the next ones
    wrong = [each for place, width in enumerate(WIDTHS) for each in bad(sorted(same)[place % 4 :: 4], width)]
    wrong += [each for width in WIDTHS[::4] for each in bad(map(printable, tables(width)), width)]

    assert len(same) > 400
    assert wrong == []


def test_a_table_fits_before_anything_is_broken_and_has_all_its_cells() -> None:
    told = situation(2, offload_optimizer="cpu").predicted()
    whole = [line for place in PLACES for line in ledger_lines(told, place, 1 << 20)]
    cells = {cell for line in whole for cell in line.split()}

    for width in WIDTHS[::5]:
        narrow = [line for place in PLACES for line in ledger_lines(told, place, 1 << 20, width)]
        speeds = list(speed_lines(healthy_4(), verbose=True, width=width))[3:]

        assert [line for line in (*narrow, *speeds) if len(line) > width] == []
        assert {cell for line in narrow for cell in line.split()} == cells


def test_a_column_for_which_there_is_no_room_stands_below_and_no_word_is_lost() -> None:
    names = ("vm", "gpu-node-0042", "login.eu-central.cluster.example")
    wrong = []
    for name, behind in itertools.product(names, (1.0, 3.0)):
        slow = replace(speed("reduce_scatter", 1 << 24, 0.04, 2), medians=(0.04 / behind, 0.04 / behind))
        found = report((name, name), good_phases(2, 1), speeds=(slow, speed("all_reduce", 8, 1e-4, 2)))
        whole = {word for line in list(speed_lines(found, verbose=True))[2:] for word in line.split()}
        for width in WIDTHS[::5]:
            lines = list(speed_lines(found, verbose=True, width=width))[2:]
            if any(len(line) > width for line in lines) or {word for line in lines for word in line.split()} != whole:
                wrong.append((name, behind, width, lines))

    assert wrong == []


def test_the_table_of_all_ops_fits_from_40_columns_on() -> None:
    ops = [OpVerdict(op=name, verdict=how, because=None, mended="builds") for name, how in
           itertools.product(("async_io", "transformer_inference"), ("installed", "builds", "cannot"))]  # fmt: skip
    wrong = []
    for width in (None, *WIDTHS):
        lines = list(op_lines(tuple(ops), SOURCE, verbose=True, width=width))[1:]
        if any(len(line) > (width or 100) for line in lines) or sum("async_io" in line for line in lines) % 3:
            wrong.append((width, lines))
        if width is None or width >= 60:
            wrong += [(width, lines)] * (len(lines) != 1 + len(ops) or not lines[1].startswith("    ✓ async_io  "))

    assert wrong == []
