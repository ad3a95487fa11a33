"""Ranks that we started and that did not reach rank 0: their own words say whose fault it is."""

from itertools import combinations

from dsdoctor.comm.command import report_of, with_last_words
from dsdoctor.comm.launch.start import RankEnded
from dsdoctor.comm.models import CommPhase, CommSettings, PhaseState
from dsdoctor.comm.preflight.checks import master_unreachable
from dsdoctor.comm.rendezvous import checks as rendezvous_checks
from dsdoctor.comm.rendezvous.checks import Absent
from dsdoctor.comm.rendezvous.store import StoreUnreachable
from dsdoctor.comm.results import ConnectOutcome, bad_ranks
from dsdoctor.core.errors import DoctorError
from dsdoctor.core.finding import Finding
from tests.comm.made_claims import rank
from tests.comm.reports import claim, phase, report
from tests.each import each

HOSTS = ("node0", "node1", "node2", "node3")
OUTCOMES = {
    "does not answer": ConnectOutcome.TIMED_OUT,
    "refuses": ConnectOutcome.REFUSED,
    "cannot be routed to": ConnectOutcome.NO_ROUTE,
    "is a name that does not resolve": ConnectOutcome.NO_NAME,
}


def last_words(number: int, how: str, master: str = "10.0.0.1", resolved: tuple[str, ...] = ()) -> str:
    """The last line of a rank that did not reach rank 0, as it says it itself; its host has 127.0.1.1."""
    absent = Absent(
        me=rank(number, master=master, port=22368),
        host=f"node{number}",
        why=StoreUnreachable(outcome=OUTCOMES[how], seconds=9.0),
        addresses=("127.0.1.1",),
        resolved=resolved,
    )
    (finding,) = rendezvous_checks.master_unreachable(absent)
    return f"rendezvous: {finding.title}  [{finding.rule}]"


@each("how", OUTCOMES)
@each("count", [1, 2, 3])
@each("master, resolved", [("10.0.0.1", ("10.0.0.1",)), ("node0", ("10.0.0.1", "fd00::1")), ("fd00::1", ("fd00::1",))])
def test_the_host_of_rank_0_is_named_only_where_no_other_host_got_in(
    count: int, how: str, master: str, resolved: tuple[str, ...]
) -> None:
    for absent in combinations((1, 2, 3), count):
        words = {number: last_words(number, how, master, resolved) for number in absent}
        (finding,) = master_unreachable(words, HOSTS, set(range(4)) - set(absent))

        named = how != "is a name that does not resolve"
        assert ("no other host can connect to node0" in finding.title) == (count == 3 and named)
        assert all(f"(node{number})" in finding.title for number in absent)
        assert (f"{master}:22368 " if named else f"cannot resolve {master},") in finding.title
        assert how in finding.title or not named
        assert finding.fix is not None
        assert finding.fix.commands[0].startswith(f"ssh node{absent[0]} ")
        assert (f" {master} 22368 " if named else f"getent hosts {master}") in finding.fix.commands[0]
        assert named or "firewall" not in repr(finding)


def test_a_rank_that_was_led_to_its_own_host_does_not_accuse_that_of_rank_0() -> None:
    words = {number: last_words(number, "refuses", "node0", ("127.0.1.1",)) for number in (1, 2, 3)}

    assert all("is this host itself" in text for text in words.values())
    assert list(master_unreachable(words, HOSTS, {0})) == []


def test_the_ranks_words_take_the_place_of_a_rank_that_never_came() -> None:
    missing = Finding.error("rank-missing", "ranks 1 (node1), 2 (node2) never came")
    seen = phase(CommPhase.RENDEZVOUS, "1 of 3 ranks are here", missing, state=PhaseState.BROKEN)
    whole = report(HOSTS[:3], (seen,), ranks=(claim(0, "node0"),))
    words = {number: last_words(number, "does not answer") for number in (1, 2)}

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
        (None, "rank 0 wrote no report: it exited with status 0, but wrote no document"),
    ],
)
def test_the_end_of_rank_0_is_a_sentence(how: str | None, said: str) -> None:
    try:
        report_of(None, (RankEnded(rank=0, host="node0", how=how),), CommSettings())
    except DoctorError as error:
        assert str(error) == said
    else:
        raise AssertionError("there is a report")
