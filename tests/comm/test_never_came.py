"""Ranks that we started and that did not reach rank 0: their own words say whose fault it is."""

from itertools import combinations

from dsdoctor.comm.bad_ranks import bad_ranks
from dsdoctor.comm.launch.start import RankEnded
from dsdoctor.comm.models import CommPhase, CommSettings, PhaseState
from dsdoctor.comm.preflight.never_came import master_unreachable
from dsdoctor.commands.comm_on_hosts import report_of, with_last_words
from dsdoctor.core.errors import DoctorError
from dsdoctor.core.finding import Finding
from tests.comm.reports import claim, phase, report
from tests.each import each

HOSTS = ("node0", "node1", "node2", "node3")
AWAY = "rendezvous: rank {rank} (node{rank}): 10.0.0.1:22368, where rank 0 should be, {how}  [master-unreachable]"


@each("how", ["does not answer", "refuses", "cannot be routed to"])
@each("count", [1, 2, 3])
def test_the_host_of_rank_0_is_named_only_where_no_other_host_got_in(count: int, how: str) -> None:
    for absent in combinations((1, 2, 3), count):
        words = {rank: AWAY.format(rank=rank, how=how) for rank in absent}
        (finding,) = master_unreachable(words, HOSTS, set(range(4)) - set(absent))

        assert ("node0 with rank 0 lets no other host in" in finding.title) == (count == 3)
        assert all(f"(node{rank})" in finding.title for rank in absent)
        assert how in finding.title
        assert finding.fix is not None
        assert finding.fix.commands[0].startswith(f"ssh node{absent[0]} ")


def test_the_ranks_words_take_the_place_of_a_rank_that_never_came() -> None:
    missing = Finding.error("rank-missing", "ranks 1 (node1), 2 (node2) never came")
    seen = phase(CommPhase.RENDEZVOUS, "1 of 3 ranks are here", missing, state=PhaseState.BROKEN)
    whole = report(HOSTS[:3], (seen,), ranks=(claim(0, "node0"),))
    words = {rank: AWAY.format(rank=rank, how="does not answer") for rank in (1, 2)}

    assert [one.rule for one in with_last_words(whole, words).findings] == ["master-unreachable"]
    assert [one.rule for one in with_last_words(whole, {1: words[1]}).findings] == [
        "master-unreachable",
        "rank-missing",
    ]
    assert with_last_words(whole, {1: "ImportError: torch"}) == whole
    assert bad_ranks(with_last_words(whole, words)).keys() == {1, 2}


@each(
    "how, said",
    [
        ("exit status 2", "rank 0 wrote no report: it ended with exit status 2"),
        ("killed by SIGKILL", "rank 0 wrote no report: it was killed by SIGKILL"),
        (
            "the command on node0 ended with status 2",
            "rank 0 wrote no report: the command on node0 ended with status 2",
        ),
        (None, "rank 0 wrote no report: it ended with status 0, and wrote no document"),
    ],
)
def test_the_end_of_rank_0_is_a_sentence(how: str | None, said: str) -> None:
    try:
        report_of(None, (RankEnded(rank=0, host="node0", how=how),), CommSettings())
    except DoctorError as error:
        assert str(error) == said
    else:
        raise AssertionError("there is a report")
