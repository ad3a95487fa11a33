"""Hosts that offer one address: whether it leads to all of them is what the attempts say."""

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

from dsdoctor.comm.control import phases
from dsdoctor.comm.control.messages import Phase, RankAnswer, RankOrder
from dsdoctor.comm.control.test_state import Responses
from dsdoctor.comm.mesh import checks
from dsdoctor.comm.mesh.matrix import ConnectionMatrix
from dsdoctor.comm.models import Claim, CommPhase, CommSettings
from dsdoctor.comm.results import ConnectOutcome, Reach
from dsdoctor.core.finding import Finding
from tests.comm.made_claims import claims
from tests.each import each

FAILED = [one for one in ConnectOutcome if one not in {ConnectOutcome.REACHED, ConnectOutcome.STALLED}]


def alike(world: int, *ranks: int) -> tuple[Claim, ...]:
    """A rank on each host; those of ``ranks`` offer the same address."""
    return tuple(replace(one, address="172.17.0.2") if one.rank in ranks else one for one in claims(world, 1))


def tried(made: tuple[Claim, ...], failed: set[tuple[int, int]], how: ConnectOutcome) -> tuple[Reach, ...]:
    return tuple(
        Reach(
            source=one.rank,
            target=other.rank,
            outcome=how if (one.rank, other.rank) in failed else ConnectOutcome.REACHED,
            address=other.address,
        )
        for one in made
        for other in made
        if one is not other
    )


def rules(mesh: ConnectionMatrix) -> list[str]:
    return [finding.rule for check in checks.CHECKS for finding in check(mesh)]


@each("got", [ConnectOutcome.REACHED, ConnectOutcome.STALLED])
def test_several_names_of_one_network_that_all_answer_are_no_fault(got: ConnectOutcome) -> None:
    for count in range(2, 5):
        for ranks in combinations(range(4), count):
            made = alike(4, *ranks)
            assert "mesh-address-shared" not in rules(ConnectionMatrix(made, tried(made, {(ranks[0], ranks[1])}, got)))


@each("how", FAILED)
def test_an_address_that_leads_to_one_of_its_hosts_only_is_told(how: ConnectOutcome) -> None:
    made = alike(4, 1, 2)
    between, from_third = {(1, 2), (2, 1)}, {(0, 2), (3, 2)}

    assert rules(ConnectionMatrix(made, tried(made, between, how))) == ["mesh-address-shared"]
    sparse = tuple(one for one in tried(made, from_third, how) if {one.source, one.target} != {1, 2})
    assert rules(ConnectionMatrix(made, sparse)) == ["mesh-address-shared"]


@each("how", FAILED)
def test_a_rank_that_does_not_answer_on_one_network_is_that_rank_s_fault(how: ConnectOutcome) -> None:
    made = alike(5, 0, 1, 2)
    live = tuple(one for one in tried(made, set(), how) if 2 not in {one.source, one.target})
    fallen = tuple(Reach(source=source, target=2, outcome=how) for source in (0, 1, 3, 4))

    assert rules(ConnectionMatrix(made, live, fallen=fallen)) == []
    apart = tuple(one for one in live if {one.source, one.target} != {0, 1})
    assert rules(ConnectionMatrix(made, apart, fallen=fallen)) == ["mesh-address-shared"]


def test_an_address_that_another_host_has_beside_its_own_is_told_too() -> None:
    made = list(claims(3, 1))
    local = made[2].local
    assert local is not None
    second = replace(local.interfaces[0], address=made[1].address, name="eth0:1")
    made[2] = replace(made[2], local=replace(local, interfaces=(*local.interfaces, second)))
    found = tried(tuple(made), {(2, 1)}, ConnectOutcome.REFUSED)

    (finding,) = [finding for check in checks.CHECKS for finding in check(ConnectionMatrix(tuple(made), found))]
    assert finding.rule == "mesh-address-shared"
    assert finding.title.startswith("nodeb and nodec have the same address 10.0.0.2; ")
    assert "nodec has it on eth0:1, next to 10.0.0.3" in finding.evidence
    assert rules(ConnectionMatrix(tuple(made), tried(tuple(made), set(), ConnectOutcome.REFUSED))) == []
    other = tuple(replace(one, via_other=one.outcome is ConnectOutcome.REFUSED) for one in found)
    assert rules(ConnectionMatrix(tuple(made), other)) == ["mesh-wrong-interface"]


class Run(SimpleNamespace):
    """What the phase asks of a test: ranks 2 and 4 of five do not answer."""

    def ask(self, phase: CommPhase, *, seconds: float) -> Responses:
        made, answering = self.claims, (0, 1, 3)
        ended = {(source, target) for source in range(5) for target in (2, 4)}
        found = tried(made, ended, ConnectOutcome.REFUSED)
        answers = tuple(
            RankAnswer(rank=rank, reaches=tuple(r for r in found if r.source == rank)) for rank in answering
        )
        silent = dict.fromkeys((2, 4), ConnectOutcome.REFUSED)
        return Responses(order=RankOrder(number=1, phase=phase), answers=answers, silent=silent)

    def trouble(self, gathered: Responses, what: str) -> tuple[Finding, ...]:
        self.mute |= set(gathered.silent)
        return tuple(Finding.error("rank-died", f"rank {rank} in {what}") for rank in gathered.silent)


def meshed(*shared: int) -> tuple[Run, Phase]:
    """The phase where these ranks offer one address."""
    settings = CommSettings()
    run = Run(
        claims=alike(5, *shared), me=SimpleNamespace(world=5), left=60.0, settings=settings, mute=set(), reaches=()
    )
    phase = Phase()
    phases.mesh(run, phase)  # type: ignore[arg-type]
    return run, phase


def test_where_another_host_has_the_address_of_rank_0_nobody_is_said_to_have_died() -> None:
    run, phase = meshed(0, 2)

    assert [one.rule for one in phase.findings] == ["mesh-address-shared"]
    assert run.mute == {2, 4}


def test_a_rank_that_died_elsewhere_is_named_beside_an_address_that_two_hosts_have() -> None:
    run, phase = meshed(1, 2)

    assert [(one.rule, "rank 4" in one.title) for one in phase.findings] == [
        ("rank-died", True),
        ("mesh-address-shared", False),
    ]
    assert run.mute == {2, 4}
    assert {(one.source, one.target) for one in run.reaches} == {
        (one, other) for one in (0, 1, 3) for other in (0, 1, 3) if one != other
    }
