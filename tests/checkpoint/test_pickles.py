"""Pickles are read as data: nothing in them is called, and what is hostile or too large ends in NotUnderstood."""

import os
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.checkpoint.inert_pickle import Call, NotUnderstood, read_pickle, tensors

PLAIN: list[Any] = [
    {"a": 1, "b": [1.5, None, True], "c": ("x", -3)},
    [],
    (),
    {"deep": {"deeper": [{"deepest": 2**70}]}},
    OrderedDict(a=OrderedDict(b=-1)),
    "ä" * 300,
]


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_plain_data_is_read_as_pickle_reads_it(protocol: int) -> None:
    for value in PLAIN:
        assert read_pickle(pickle.dumps(value, protocol)) == value


class Runs:
    """What an unpickler would execute."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_what_a_pickle_would_execute_is_a_name_only(tmp_path: Path, protocol: int) -> None:
    read = read_pickle(pickle.dumps({"x": Runs(tmp_path / "made")}, protocol))

    assert isinstance(read["x"], Call)
    assert read["x"].function.endswith(".mkdir")
    assert not (tmp_path / "made").exists()


def test_damaged_pickles_end_in_one_error_and_nothing_else() -> None:
    whole = pickle.dumps({"a": [1, 2, (3, "four")], "b": OrderedDict(c={"d": 2.0})}, 2)
    choice = random.Random(7)
    refused = 0
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(choice.randint(1, 3)):
            changed[choice.randrange(len(changed))] = choice.randrange(256)
        try:
            read_pickle(bytes(changed[: choice.randint(1, len(changed))]))
        except NotUnderstood:
            refused += 1
    assert refused > 100


def shared(levels: int, *, inner: bytes = b")", make: bytes = b"\x86") -> bytes:
    """A tuple (or what ``make`` makes) of twice the same, and so on: few bytes, and 2 ** levels values."""
    return b"".join((b"\x80\x04", inner, *(b"\x94h" + bytes([each]) + make for each in range(levels)), b"."))


BOMBS: dict[str, bytes] = {
    "shared tuples": shared(34),
    "shared lists": b"\x80\x04]"
    + b"".join(b"\x94](h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(34))
    + b".",
    "shared dicts": b"\x80\x04}"
    + b"".join(b"\x94}(K\x01h" + bytes([n]) + b"K\x02h" + bytes([n]) + b"u" for n in range(34))
    + b".",
    "a text of a megabyte, often": b"\x80\x04X"
    + (1 << 20).to_bytes(4, "little")
    + bytes(1 << 20)
    + b"\x94("
    + b"h\0" * 900
    + b"t.",
    "lists in lists": b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".",
    "tuples in tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "a list within itself": b"\x80\x04]\x94h\0a.",
    "a number of a million digits": b"\x80\x02\x8b" + (500_000).to_bytes(4, "little") + b"\x7f" * 500_000 + b".",
    "a number of many digits, as text": b"L" + b"9" * 5000 + b"L\n.",
    "a name of a megabyte": b"\x80\x04X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20) + b"\x94h\0\x93.",
    "parts that are each on top of the last": b"\x80\x04("
    + b"]"
    + b"\x94"
    + b"".join(b"h" + bytes([n]) + b"\x85" * 90 + b"\x94" for n in range(60))
    + b"l.",
    "a bomb in a call": b"\x80\x04cx\ny\n)" + shared(34)[3:-1] + b"R.",
    "a bomb in the state of an object": b"\x80\x04cx\ny\n)R" + shared(34)[2:-1] + b"b.",
    "a bomb as a key": b"\x80\x04}" + shared(34)[2:-1] + b"Ns.",
    "an opcode that torch does not write": b"\x80\x02N2.",
    "a mark in place of a value": b"\x80\x02(K\x01\x85t\x86.",
}


def test_bombs_end_in_one_error() -> None:
    """Each was read once and then hashed, compared or printed, which does not end: in C, where no ctrl-C is heard."""
    said = {}
    for name, bomb in BOMBS.items():
        try:
            content = read_pickle(bomb)
            # where it is cut off, what is left may be used for anything
            said[name] = f"read: {hash(repr(content))}"
        except NotUnderstood:
            continue

    assert set(said) == {"a bomb as a key"}
    assert "tuple 0" in read_pickle(BOMBS["a bomb as a key"])


def test_numbers_that_hash_alike_are_no_keys() -> None:
    """All multiples of 2 ** 61 - 1 have one hash: a dict of them is filled in quadratic time."""
    alike = {(2**61 - 1) * factor: factor for factor in range(1, 1000)}

    read = read_pickle(pickle.dumps(alike))

    assert sum(isinstance(key, str) for key in read) > 990
    assert sorted(read.values()) == sorted(alike.values())


def test_an_object_that_leads_back_to_itself_is_read() -> None:
    made = read_pickle(b"\x80\x04cx\ny\n)R\x94}X\x02\0\0\0meh\0sb.")

    assert made.state == {"me": made}
    assert "function" in repr(made)


def test_shapes_that_no_tensor_has_are_no_shapes() -> None:
    long = b"\x80\x04ctorch\nSize\n(" + b"K\x02" * 65 + b"t\x85R."
    wide = b"\x80\x04ctorch\nSize\n\x8a\x09" + b"\xff" * 8 + b"\0\x85\x85R."

    assert isinstance(read_pickle(long), Call)
    assert isinstance(read_pickle(wide), Call)


OPERATIONS = (
    b"N", b"\x88", b"K\x01", b"J\xff\xff\xff\x7f", b"\x8a\x09" + b"\x7f" * 9, b"G\x7f\xf8\0\0\0\0\0\0", b"X\x01\0\0\0a",
    b"\x8c\x07storage", b"\x8c\x010", b"\x8c\x03cpu", b"U\x01b", b"C\x01\xff", b"}", b"]", b")", b"\x8f", b"(", b"(", b"t", b"l",
    b"d", b"e", b"u", b"a", b"s",
    b"\x85", b"\x86", b"\x87", b"\x90", b"\x91", b"0", b"1", b"\x94", b"q\0", b"h\0", b"h\x01", b"g0\n",
    b"p1\n", b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nSize\n", b"ccollections\nOrderedDict\n",
    b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch._utils\n_rebuild_parameter\n", b"\x93", b"R", b"\x81", b"b", b"Q",
    b"(\x8c\x07storagectorch\nFloatStorage\n\x8c\x010\x8c\x03cpuK\x04tQ", b"K\0K\x02K\x02\x86K\x02K\x01\x86",
    b"I01\n", b"L7L\n", b"F1e999\n", b"V\\ud800\n", b"S'x'\n", b"\x95\x08\0\0\0\0\0\0\0", b"\x80\x05", b".",
)  # fmt: skip
"""What torch writes and a little more, with arguments that fit and some that do not."""


def fuzz_pickle(choice: random.Random) -> bool:
    """Read a program of opcodes by chance, and use what comes of it as judgements do; whether it was read."""
    program = b"".join(choice.choices(OPERATIONS, k=choice.randint(1, 60))) + b"."
    try:
        content = read_pickle(program)
    except NotUnderstood:
        return False
    again = read_pickle(program)
    assert len(repr(content)) < 1 << 20
    assert isinstance(content == again, bool)
    assert [way for way, _ in tensors(content)] == [way for way, _ in tensors(again)]
    return True


@pytest.mark.parametrize(
    "count", [pytest.param(300, id="some"), pytest.param(20_000, id="many", marks=pytest.mark.exhaustive)]
)
def test_programs_by_chance_end_in_data_or_in_one_error(count: int) -> None:
    choice = random.Random(count)

    read = sum(fuzz_pickle(choice) for _ in range(count))

    assert count // 50 < read < count
