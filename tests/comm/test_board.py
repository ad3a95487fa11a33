"""The blackboard over a store in memory that counts what is asked of it."""

import json
import zlib

import msgspec
import pytest

from dsdoctor.comm.control.messages import RankAnswer, RankOrder, Update
from dsdoctor.comm.models import Claim
from dsdoctor.comm.rendezvous.store import BATCH, MOST, MessageBoard, packed, unpacked


class Memory:
    """A store with the verbs of a TCPStore, and the number of requests."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.requests = 0

    def add(self, key: str, amount: int) -> int:
        self.requests += 1
        self.kept[key] = str(int(self.kept.get(key, b"0")) + amount).encode()
        return int(self.kept[key])

    def set(self, key: str, value: bytes | str) -> None:
        self.requests += 1
        self.kept[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return all(key in self.kept for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        return [self.kept[key] for key in keys]

    def wait(self, key: str, seconds: float) -> bool:
        self.requests += 1
        return key in self.kept


def test_a_log_gives_each_message_once_in_the_order_of_writing() -> None:
    board = MessageBoard(Memory(), "t")
    log = board.log("claims")
    for name in ("a", "b"):
        board.log("claims").write(name)

    assert list(log.news(str)) == ["a", "b"]
    assert list(log.news(str)) == []
    board.log("claims").write("c")
    assert (list(log.news(str)), log.count()) == (["c"], 3)


def test_what_is_no_message_in_the_store_is_passed_over() -> None:
    board = MessageBoard(Memory(), "t")
    log = board.log("claims")
    log.write(7)
    board.store.set(board.key(f"claims/{board.store.add(board.key('claims/n'), 1)}"), b"\xff{")
    for junk in (b'"\xff"', b'{"x":"\xff"}', b"[" * 3000, zlib.compress(b"[" * 30_000)):
        board.store.set(board.key(f"claims/{board.store.add(board.key('claims/n'), 1)}"), junk)
    log.write("not a number")
    log.write(8)

    assert list(log.news(int)) == [7, 8]


def test_reading_a_log_costs_a_request_for_many_messages_not_one_for_each() -> None:
    store = Memory()
    board = MessageBoard(store, "t")
    for number in range(1000):
        board.log("claims").write(number)
    store.requests = 0

    assert list(board.log("claims").news(int)) == list(range(1000))
    assert store.requests <= 2 * (1000 // BATCH + 1) + 1


def test_a_writer_that_died_between_number_and_text_is_passed_over() -> None:
    store = Memory()
    board = MessageBoard(store, "t")
    log = board.log("claims")
    store.add("t/claims/n", 1)
    log.write("alive")

    assert list(log.news(str)) == ["alive"]


def test_boards_of_two_tests_in_one_store_do_not_meet() -> None:
    store = Memory()
    mine, other = MessageBoard(store, "one"), MessageBoard(store, "other")
    mine.put("verdict", {"ok": True})

    assert (mine.has("verdict"), other.has("verdict")) == (True, False)
    assert json.loads(store.kept["one/verdict"]) == {"ok": True}


def test_no_message_between_ranks_can_carry_a_finding_or_a_step() -> None:
    _, parts = msgspec.json.schema_components([Claim, RankAnswer, RankOrder])
    _, own = msgspec.json.schema_components([Update])

    assert {"Finding", "Fix", "Step"} <= set(own)
    assert not {"Finding", "Fix", "Step"} & set(parts)
    assert {"Claim", "RankAnswer", "RankOrder", "Local", "Stuck"} <= set(parts)


def test_a_long_message_of_16_gpus_fits_into_a_frame_and_is_the_same() -> None:
    made = [
        {"index": number, "name": "NVIDIA H200", "uuid": f"GPU-{number:032x}", "links": list(range(18))}
        for number in range(16)
    ]

    assert len(msgspec.json.encode(made)) > 1448 > len(packed(made))
    assert unpacked(packed(made), list[dict[str, object]]) == made


@pytest.mark.parametrize("content", [b"x", b"x\x9c\x00", packed("a" * 9999)[:-1], zlib.compress(b" " * (MOST + 1), 1)])
def test_what_is_no_whole_message_is_refused(content: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        unpacked(content, str)
