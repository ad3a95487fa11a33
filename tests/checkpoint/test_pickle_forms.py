"""What is called and filled in a checkpoint must be so in the form of its makers: a known name alone promises nothing."""

import argparse
import io
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from dsdoctor.checkpoint.inert_pickle import ODDLY, read_pickle
from dsdoctor.checkpoint.universal import TRUSTED


class Own(torch.nn.Linear):
    """A module with a parameter that has a field of its own."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.weight.tensor_model_parallel = True  # type: ignore[assignment]


def odd(content: bytes) -> set[str]:
    """The names for which the converter is not given a pickle."""
    names: set[str] = set()
    read_pickle(content, names)
    return {name for name in names if not TRUSTED.fullmatch(name)}


def saved(value: Any, protocol: int) -> bytes:
    made = io.BytesIO()
    torch.save(value, made, pickle_protocol=protocol)
    with zipfile.ZipFile(made) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_torch_numpy_and_python_write_themselves_is_known(protocol: int) -> None:
    content = {
        "module": Own().state_dict(),
        "parameters": dict(Own().named_parameters()),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "views": (whole := torch.arange(6.0), whole[2:4]),
        "random": (np.random.RandomState(3).get_state(), torch.get_rng_state()),
        "numbers": [np.float32(3), np.int64(4), np.bool_(True), np.arange(3.0), np.array([], dtype=np.int8)],
        "python": [complex(1, 2), {1, 2}, frozenset({3}), bytearray(b"xy"), slice(1, 2), b"bytes"],
        "containers": [OrderedDict(a=1), defaultdict(list, a=[1]), defaultdict(dict)],
        "args": argparse.Namespace(data_path="x", real=True),
        "shape": torch.Size((2, 3)),
        "device": torch.device("cpu"),
        "type": torch.float32,
    }

    assert odd(saved(content, protocol)) == set()


class Made:
    """An object that unpickles by a call of one's own choice, with a state and items."""

    def __init__(
        self, function: Any, *arguments: Any, state: Any = None, values: Any = None, items: Any = None
    ) -> None:
        self.reduced = (function, arguments, state, values, items)

    def __reduce__(self) -> Any:
        return self.reduced


class AsClass:
    """A class itself, which a state is put into."""

    def __init__(self, kind: Any, state: Any) -> None:
        self.kind, self.state = kind, state


def array_of_objects() -> Made:
    """Pointers made of bytes."""
    return Made(np.ndarray, (1,), "O", bytearray(b"A" * 8))


RECONSTRUCT = np.zeros(1).__reduce__()[0]
BUILD_TENSOR = torch._utils._rebuild_tensor_v2
TYPED = torch._tensor._rebuild_from_type_v2
DTYPE = (3, "<", None, None, None, -1, -1, 0)
ATTACKS: dict[str, Any] = {
    "an array of objects": array_of_objects(),
    "a list of pointers": Made(list, array_of_objects()),
    "an array of no type of numbers": Made(np.dtype, "O", False, True),
    "fields in a type": Made(np.dtype, "V16", False, True),
    "a type that is shared": Made(np.dtype, "f8", False, False),
    "a type with a state of its own": Made(
        np.dtype, "f8", False, True, state=(3, "<", None, ("a",), {"a": 1}, 8, 8, 16)
    ),
    "an array with a state of its own": Made(
        RECONSTRUCT,
        np.ndarray,
        (0,),
        b"b",
        state=(1, (1,), Made(np.dtype, "f8", False, True, state=DTYPE), False, ["x"]),
    ),
    "an array of another class": Made(RECONSTRUCT, np.dtype, (0,), b"b"),
    "an array that has a size": Made(RECONSTRUCT, np.ndarray, (1 << 40,), b"O"),
    "any function with any arguments": Made(TYPED, list, torch.Tensor, ([1],), {}),
    "a tensor of another class": Made(TYPED, BUILD_TENSOR, np.ndarray, (1, 2, 3, 4), {}),
    "a tensor of nothing": Made(BUILD_TENSOR, 1, 2, (3,), (4,), False, OrderedDict()),
    "items in an array": Made(bytearray, b"x" * 8, items=iter([(0, 65)])),
    "values in bytes": Made(bytearray, b"x", values=iter([65])),
    "what is called where nothing is": Made(defaultdict, np.ndarray),
    "an encoding of another kind": Made(__import__("_codecs").encode, "x", "punycode"),
    "memory without an end": Made(bytearray, 1 << 40),
    "a class of storages": Made(torch.FloatStorage, 1 << 40),
    "memory as it is": Made(torch.Tensor, 1 << 10),
    "a class that is changed": Made(OrderedDict, state={"__class__": 1}),
    "a complex of pointers": Made(complex, array_of_objects()),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_known_name_in_another_form_is_refused(name: str) -> None:
    found = odd(pickle.dumps({"note": ATTACKS[name]}, 2))

    assert any(each.endswith(ODDLY) for each in found), found


def test_a_state_that_is_put_into_a_class_or_a_tensor_is_refused() -> None:
    into_class = b"cnumpy\nndarray\n}X\x01\x00\x00\x00aK\x01sb."
    called_twice = b"cbuiltins\nlist\n)R)R."
    no_storage = b"((X\x07\x00\x00\x00storagecnumpy\nndarray\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQt."

    assert odd(into_class) == {f"numpy.ndarray {ODDLY}"}
    assert any(each.endswith(ODDLY) for each in odd(called_twice))
    assert odd(no_storage) == {f"numpy.ndarray {ODDLY}"}
