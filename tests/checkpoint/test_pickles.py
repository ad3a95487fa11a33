"""Pickles are read as data: nothing in them is called, and what is hostile or too large ends in NotUnderstood."""

import os
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.checkpoint.torch_file import Call, NotUnderstood, read_pickle, tensors

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


def test_a_nest_without_end_is_walked_to_a_limit() -> None:
    assert list(tensors(read_pickle(b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b"."))) == []
