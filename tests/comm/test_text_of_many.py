"""A thousand ranks in a terminal: hosts are folded, a cause is told once, and no more than a page is printed."""

from dataclasses import replace

import pytest

from dsdoctor.comm.collectives.checks import STUCK_CHECKS, FailedExchange
from dsdoctor.comm.control.phases import exchanges_unfinished
from dsdoctor.comm.models import CommPhase, PhaseState, Rank
from dsdoctor.comm.preflight import checks as preflight_checks
from dsdoctor.comm.rendezvous import checks as rendezvous_checks
from dsdoctor.comm.rendezvous.checks import Arrivals
from dsdoctor.comm.rendezvous.notices import Notice
from dsdoctor.comm.results import ConnectOutcome, Report, Stuck, bad_ranks
from dsdoctor.comm.text import rank_lines, rank_states, report_lines
from dsdoctor.core.finding import Finding, Severity
from tests.comm.reports import claim, good_phases, healthy_4, phase, report, speeds
from tests.comm.test_preflight import facts, visit

HOSTS = tuple(f"gpu{rank // 8:04d}" for rank in range(1000))
CLAIMS = tuple(claim(rank, host, rank % 8) for rank, host in enumerate(HOSTS))
GONE = (*range(8, 40), *range(800, 808), 999)
MOST = 60


def whole(*findings: Finding, at: CommPhase = CommPhase.RIGHT, **changes: object) -> Report:
    """A thousand ranks with these findings in one phase."""
    phases = (*good_phases(1000, 125)[:4], phase(at, "", *findings, state=PhaseState.BROKEN))
    return report(HOSTS, phases if findings else good_phases(1000, 125), **{"reaches": (), **changes})


def shown(found: Report, *, verbose: bool = False) -> list[str]:
    return list(report_lines(found, verbose=verbose))


def dead(how: str, ranks: tuple[int, ...] = GONE) -> tuple[Stuck, ...]:
    return tuple(Stuck(rank=rank, at="all_reduce", step=3, seconds=1.0, ended=how) for rank in ranks)


def judged(trouble: FailedExchange) -> tuple[Finding, ...]:
    return tuple(finding for check in STUCK_CHECKS for finding in check(trouble))


def stuck_report(stuck: tuple[Stuck, ...], silent: dict[int, ConnectOutcome] | None = None) -> Report:
    found = judged(FailedExchange(what="the collectives", claims=CLAIMS, stuck=stuck, silent=silent or {}))
    return whole(*found, stuck=stuck)


def missing(why: str) -> Report:
    me = Rank(rank=0, world=1000, local_rank=0, local_world=8, launcher="dsdoctor", master="m", port=1, hosts=HOSTS)
    came = tuple(one for one in CLAIMS if one.rank not in GONE)
    notices = {rank: Notice(run="0", rank=rank, host=HOSTS[rank], why=why) for rank in GONE} if why else {}
    arrivals = Arrivals(me=me, claims=tuple(replace(one, world=1000) for one in came), waited=30.0, notices=notices)
    found = tuple(finding for check in rendezvous_checks.CHECKS for finding in check(arrivals))
    return whole(*found, at=CommPhase.RENDEZVOUS, ranks=came)


CASES = {
    "died": lambda: stuck_report(dead("killed by SIGKILL")),
    "stopped": lambda: stuck_report(tuple(replace(one, ended=None, process="T") for one in dead(""))),
    "vanished": lambda: stuck_report((), dict.fromkeys(GONE, ConnectOutcome.TIMED_OUT)),
    "missing": lambda: missing(""),
    "unable": lambda: missing("torch cannot be imported: libcudart.so.13"),
}
RULES = {
    "died": "rank-died",
    "stopped": "rank-stopped",
    "vanished": "host-vanished",
    "missing": "rank-missing",
    "unable": "rank-unable",
}


@pytest.mark.parametrize("kind", CASES)
def test_one_cause_on_many_hosts_is_one_finding_on_one_page(kind: str) -> None:
    found = CASES[kind]()
    lines = shown(found)

    assert [finding.rule for finding in found.findings] == [RULES[kind]]
    assert "gpu[0001-0004,0100,0124]" in lines[0]
    assert len(lines) <= MOST
    assert found.findings[0].severity is Severity.ERROR


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind != "vanished"])
def test_the_rows_name_the_ranks_of_the_verdict_and_no_others(kind: str) -> None:
    found = CASES[kind]()
    states = rank_states(found)

    assert tuple(rank for rank, state in states.items() if state != "ok") == GONE
    assert tuple(bad_ranks(found)) == GONE
    assert any("8-39, 800-807, 999 (gpu[0001-0004,0100,0124])" in line for line in shown(found)[1:])
    assert "  959 of 1,000 ranks are ok" in shown(found)


@pytest.mark.slow
def test_a_thousand_findings_and_every_collective_fit_a_page_unless_all_is_asked_for() -> None:
    long = tuple(f"line {number}" for number in range(30))
    raised = [
        Finding.error("rank-raised", f"rank {rank} ({HOSTS[rank]}) raised {rank}", evidence=long)
        for rank in range(1000)
    ]
    others = [Finding.warning(f"rule-{number}", f"what {number}", evidence=("a", "b")) for number in range(40)]
    found = whole(*raised, *others, speeds=speeds(1000) * 5)

    assert len(shown(found)) == MOST
    assert shown(found)[-3].endswith("more lines (--verbose shows all)")
    assert len(shown(found, verbose=True)) > 1000


def test_twenty_errors_of_a_rule_are_shown_below_the_verdict_and_the_others_counted() -> None:
    raised = [Finding.error("rank-raised", f"rank {rank} ({HOSTS[rank]}) raised {rank}") for rank in range(1000)]
    lines = shown(whole(*raised, Finding.warning("rule-0", "what")))

    assert sum(line.endswith("[rank-raised]") for line in lines) == 1 + 20
    assert "· and 979 errors, 1 warning: rank-raised, rule-0 (-v shows all)" in lines
    assert lines[-1] == "  next: $ python -m dsdoctor explain rank-raised"


def test_a_thousand_ranks_that_are_well_are_one_line() -> None:
    lines = shown(whole(speeds=speeds(1000)))

    assert lines[0] == "[gpu[0000-0124]] ranks 0-999 are OK"
    assert lines[-1].startswith("✓ 1000 of 1000 ranks reach each other")
    assert len(lines) < 20


def test_a_thousand_hosts_of_which_some_do_not_answer_are_a_finding_for_each_cause() -> None:
    visits = [visit(f"n{number:04d}", f"10.0.{number // 250}.{number % 250}") for number in range(1000)]
    for number in (*range(100, 140), 7):
        visits[number] = replace(visits[number], answered=False, status=255, stderr="Connection refused")
    for number in range(500, 600):
        visits[number] = replace(visits[number], modules=("deepspeed", "dsdoctor"))
    asked = facts(*visits)

    found = [finding for check in preflight_checks.CHECKS for finding in check(asked)]

    assert [finding.title for finding in found] == [
        "ssh to n[0007,0100-0139] failed: the host is up, but no sshd listens on its port",
        "n[0500-0599]: /p cannot import torch",
    ]


@pytest.mark.parametrize(
    ("rule", "ranks", "row"),
    [
        ("rank-raised", (1,), "raised an error"),
        ("messages-late", (1, 3), "late with every message"),
        ("rank-unable", (1, 2, 3), "cannot take part"),
        ("rank-straggles", (1, 4711, -1), "slow on its own"),
        ("ranks-misplaced", (1,), "ok"),
        ("rank-raised", (), "ok"),
    ],
)
def test_a_row_says_what_the_finding_says_that_blames_its_rank(rule: str, ranks: tuple[int, ...], row: str) -> None:
    found = replace(Finding.error(rule, "rank 0: x"), ranks=ranks)
    states = rank_states(replace(healthy_4(), phases=(phase(CommPhase.RIGHT, "", found, state=PhaseState.BROKEN),)))

    assert states == {rank: row if rank in ranks else "ok" for rank in range(4)}


@pytest.mark.parametrize(
    ("rule", "mark"),
    [("cpu-quota-used-up", "!"), ("rank-arrives-late", "!"), ("rank-lacks-processor", "!"), ("rank-raised", "✗")],
)
def test_a_rank_that_is_only_slow_is_marked_as_slow(rule: str, mark: str) -> None:
    found = replace(Finding.warning(rule, "x"), ranks=(1,))

    _, row, *_ = rank_lines(
        replace(healthy_4(), phases=(phase(CommPhase.RIGHT, "", found, state=PhaseState.SLOW),)), verbose=False
    )

    assert row.split()[0] == mark


def test_collectives_that_no_rank_came_to_the_end_of_are_no_success() -> None:
    known = (Finding.error("rank-died", "rank 1 died"),)

    assert [finding.rule for finding in exchanges_unfinished(0, ())] == ["exchanges-unfinished"]
    assert [*exchanges_unfinished(0, known), *exchanges_unfinished(3, ())] == []


def test_a_broken_test_of_any_size_is_told_on_a_screen() -> None:
    for world in (1, 2, 16, 17, 32, 64, 65, 200):
        stuck = tuple(
            Stuck(rank=rank, at="all_reduce", step=3, seconds=1.0, ended=f"exit status {rank}") for rank in range(world)
        )
        claims = CLAIMS[:world]
        found = judged(FailedExchange(what="the collectives", claims=claims, stuck=stuck, silent={}))
        phases = (*good_phases(world, 1)[:4], phase(CommPhase.RIGHT, "", *found, state=PhaseState.BROKEN))
        lines = shown(report(HOSTS[:world], phases, reaches=(), stuck=stuck))

        assert len(lines) <= MOST, world
        assert "died" in lines[0]
