"""A MASTER_ADDR that no name server can even be asked for: it is a name that does not resolve, on every rank."""

from dsdoctor.comm.mesh.mesh import connect, sent_from
from dsdoctor.comm.rendezvous.checks import addresses_of
from dsdoctor.comm.rendezvous.store import StoreUnreachable, open_board, open_served
from dsdoctor.comm.results import ConnectOutcome
from tests.comm.made_claims import rank
from tests.each import each

ODD = ("foo..bar", ".node", "a" * 70, f"{'a' * 70}.example", "\u00fc" * 70, "node\udcff")
"""Empty labels, labels of more than 63 letters, and bytes that are no text."""


@each("name", ODD)
def test_a_name_that_cannot_be_asked_for_is_not_found(name: str) -> None:
    assert connect(name, 29500, timeout=1) is ConnectOutcome.NO_NAME
    assert sent_from(name, 29500) is None
    assert addresses_of(name) == ()


@each("name", ODD)
@each("number", (0, 1))
def test_a_test_with_such_a_master_ends_in_words(name: str, number: int) -> None:
    me = rank(number, world=2, master=name, port=29500)
    found = open_board(me, 0.1, open_served(me) if number == 0 else None)

    assert isinstance(found, StoreUnreachable)
    assert found.outcome is ConnectOutcome.NO_NAME
