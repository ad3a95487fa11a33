"""The findings of a rank that got no verdict from rank 0."""

from dsdoctor.comm.control import supervisor
from dsdoctor.comm.control.supervisor import Lost
from dsdoctor.comm.results import ConnectOutcome
from tests.comm.made_claims import rank


def told(number: int, outcome: ConnectOutcome | None, **more: object) -> list[tuple[str, str]]:
    said = {"died": None, "seconds": 21.0, "host": "nodeb", "at": "tcp mesh", "log": "/out/rank-00001.log", **more}
    lost = Lost(rank=rank(number), master=outcome, **said)  # type: ignore[arg-type]
    return [(finding.rule, finding.title) for check in supervisor.CHECKS for finding in check(lost)]


def test_how_rank_0_was_lost_is_told_by_how_its_port_answers() -> None:
    def how(outcome: ConnectOutcome) -> str:
        ((rule, title),) = told(1, outcome)
        assert rule == "rank-zero-lost"
        assert title.startswith("rank 1 (nodeb): nothing from rank 0 (10.0.0.1:29500) since 'tcp mesh'; ")
        return title.partition("; ")[2]

    assert how(ConnectOutcome.REFUSED) == "its host refuses the port, so rank 0 has most likely exited"
    assert how(ConnectOutcome.TIMED_OUT) == "its host does not answer: the link or the host is down"
    assert how(ConnectOutcome.SILENT) == "its port accepts connections, so rank 0 hangs or was stopped"


def test_a_rank_whose_own_control_process_stands_still_or_died_does_not_blame_rank_0() -> None:
    assert told(1, ConnectOutcome.REFUSED, stopped=True) == [
        ("control-lost", "rank 1 (nodeb) was stopped by a signal, in 'tcp mesh'")
    ]
    assert told(1, ConnectOutcome.REFUSED, died="killed by SIGKILL") == [
        ("control-lost", "rank 1 (nodeb) ended without a verdict (killed by SIGKILL), in 'tcp mesh'")
    ]
    limit = "the out-of-memory killer of its memory cgroup, whose limit is 150 MiB"
    ((_, title),) = told(1, None, died="killed by SIGKILL", cause=limit)
    assert title == f"rank 1 (nodeb) ended without a verdict (killed by SIGKILL), in 'tcp mesh': {limit}"
    assert told(0, None) == [("control-lost", "rank 0 (nodeb) did not finish in 21 s, in 'tcp mesh'")]
