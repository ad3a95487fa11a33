"""What is called and filled in a checkpoint must be so in the form of its makers: a known name alone promises nothing."""

import argparse
import datetime
import io
import pickle
import types
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from dsdoctor.checkpoint.folder import look
from dsdoctor.checkpoint.inert_pickle import ODDLY, is_loadable, read_pickle
from dsdoctor.checkpoint.judge import judge
from dsdoctor.checkpoint.loading import Plan, Verdict
from dsdoctor.checkpoint.universal import TRUSTED
from tests.checkpoint.written import KINDS, Called, Opcodes, Weights, model_states, save, write
from tests.cli.runner import run
from tests.each import each


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


def not_loadable(content: bytes) -> set[str]:
    """The names for which it is not said that torch loads a pickle."""
    names: set[str] = set()
    read_pickle(content, names)
    return {name for name in names if not is_loadable(name)}


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
    assert not_loadable(saved(content, protocol)) == set()


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_else_of_python_and_torch_stands_in_a_client_state_is_known_to_load(protocol: int) -> None:
    content = {
        "path": PurePosixPath("a/b"),
        "when": datetime.timedelta(1, 2, 3),
        "queues": [deque([1], 3), deque(), Counter("ab")],
        "fields": types.SimpleNamespace(a=1),
        "version": torch.__version__,
        "types": [torch.uint16, torch.complex64],
        "numbers": [
            torch.ones(2, dtype=torch.complex64),
            torch.ones(3).to(torch.uint16),
            torch.nn.Parameter(torch.ones(1)),
        ],
        "key": {(1, "a", torch.Size((2,))): 1, np.int64(3): 2, None: 3},
    }

    assert not_loadable(saved(content, protocol)) == set()


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


# What is called or filled otherwise than its makers do, or is named and not there, may be refused by torch.load: no ✓ for it.


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def storage(key: str = "0", place: str = "cpu", count: bytes = b"K\x01", kind: str = "torch\nFloatStorage") -> bytes:
    return b"(" + text("storage") + f"c{kind}\n".encode() + text(key) + text(place) + count + b"tQ"


def tensor(rest: bytes, of: bytes | None = None, builder: str = "_rebuild_tensor_v2") -> bytes:
    return f"ctorch._utils\n{builder}\n(".encode() + (storage() if of is None else of) + rest + b"tR"


ONE = b"K\x00K\x01\x85K\x01\x85"
HOOKS = b"ccollections\nOrderedDict\n)R"
WHOLE = ONE + b"\x89" + HOOKS
TYPE = b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n("
REFUSED: dict[str, bytes] = {
    "too few arguments of a tensor": tensor(ONE),
    "too many arguments of a tensor": tensor(WHOLE + b"NNN"),
    "a tensor of a class": tensor(WHOLE, b"ccollections\nOrderedDict\n"),
    "a tensor of a function": tensor(WHOLE, b"ctorch._utils\n_rebuild_tensor_v2\n"),
    "a tensor of a number": tensor(WHOLE, b"K\x05"),
    "a start that is none": tensor(b"\x88" + ONE[2:] + b"\x89" + HOOKS),
    "a shape that is none": tensor(b"K\x00N" + ONE[5:] + b"\x89" + HOOKS),
    "a size that is none": tensor(b"K\x00\x88\x85K\x01\x85\x89" + HOOKS),
    "a shape of more sizes than strides": tensor(b"K\x00K\x01K\x01\x86K\x01\x85\x89" + HOOKS),
    "numbers that would train": tensor(ONE + b"\x88" + HOOKS, storage("1", kind="torch\nLongStorage")),
    "what trains is no truth": tensor(ONE + b"K\x05" + HOOKS),
    "too many arguments of a typed tensor": TYPE + storage() + WHOLE + b"t}NNtR",
    "too few arguments of a typed tensor": TYPE + storage() + WHOLE + b"ttR",
    "a typed tensor of no class": TYPE.replace(b"ctorch\nTensor\n", b")") + storage() + WHOLE + b"t}tR",
    "a typed tensor with a state that is none": TYPE + storage() + WHOLE + b"tK\x05tR",
    "a typed tensor whose shape is set": TYPE + storage() + WHOLE + b"t}" + text("shape") + b"K\x05stR",
    "a parameter of nothing": b"ctorch._utils\n_rebuild_parameter\nK\x05\x88" + HOOKS + b"\x87R",
    "a parameter without its hooks": b"ctorch._utils\n_rebuild_parameter\n" + tensor(WHOLE) + b"\x88\x86R",
    "a place that nobody knows": tensor(WHOLE, storage(place="cpy")),
    "a storage of a class of something else": tensor(WHOLE, storage(kind="collections\nOrderedDict")),
    "a size of texts": b"ctorch\nSize\n(" + text("a") + b"t\x85R",
    "a device that does not exist": b"ctorch\ndevice\n" + text("gpu") + b"\x85R",
    "a stage that does not exist": b"cdeepspeed.runtime.zero.config\nZeroStageEnum\nK\xf0\x85R",
    "a stage of nothing": b"cdeepspeed.runtime.zero.config\nZeroStageEnum\nN\x85R",
    "a module that is not there": b"cdeepspeed.runtime.zero.coPfig\nZeroStageEnum\nK\x01\x85R",
    "a function that is not there": tensor(WHOLE, builder="_rebuilt_tensor_v2"),
    "a class that is not there": b"ccollections\nOrderedCict\n)R",
    "a type that is not there": b"ctorch\nfloat17\n",
    "a class in a class, in protocol 2": b"ctorch\nnn.Linear\n",
    "a call of a number": b"K\x05)R",
    "a call of a text": text("print") + b")R",
    "a call of what was made": HOOKS + b")R",
    "an object of a function": b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage() + WHOLE + b"t\x81",
    "a class that is called without what it asks for": b"cdeepspeed.utils.tensor_fragment\nfragment_address\n)R",
    "a key that cannot be one": b"}]K\x01s",
    "a key that holds what cannot be one": b"}}\x85K\x01s",
    "a member that cannot be one": b"c__builtin__\nset\n]]a\x85R",
    "a dict of numbers": b"c__builtin__\ndict\n]K\x01a\x85R",
    "fields of a dict": b"}}" + text("a") + b"K\x01sb",
    "fields of a defaultdict": b"ccollections\ndefaultdict\n)R}" + text("a") + b"K\x01sb",
    "a state that is none": HOOKS + b"K\x05b",
    "values in a dict": b"}K\x01a",
    "values in a set": b"c__builtin__\nset\n)RK\x01a",
    "a slice of nothing": b"c__builtin__\nslice\n)R",
    "a number of a text": b"c__builtin__\nint\n" + text("x") + b"\x85R",
    "bytes of a text without its code": b"c__builtin__\nbytearray\n" + text("x") + b"\x85R",
    "letters that are no bytes": b"c_codecs\nencode\n" + text("\u20ac") + text("latin1") + b"\x86R",
    "two protocols, the latter one's": b"\x80\x04c__builtin__\nset\n)R",
    "a text of protocol 0 that is none": b"S'\\xff'\n",
    "a frame that ends behind the file": b"\x95" + b"\xff" * 8 + b"N",
    "a protocol that does not exist": b"\x80\x09N",
    "a place to remember that does not exist": b"Np-1\n",
}


def torch_load(file: Path) -> str:
    """Why torch refuses a file, "" where it loads it."""
    try:
        torch.load(file, weights_only=False)
    except Exception as error:
        return type(error).__name__
    return ""


def of_load(folder: Path, value: object) -> tuple[Verdict | None, str, str]:
    """What is said of a tag with a value in its model states: the verdict, why; and why torch refuses the file."""
    tag = write(folder, KINDS[4])
    (file,) = tag.glob("*model_states.pt")
    # the storages that the values name
    own = [Weights((1,), bytes(4)), Weights((1,), bytes(8), "I64")]
    save(file, {"more": value, "own": own, **model_states(KINDS[4], 2, 1)})
    found = judge(look(folder), None, Plan())
    refused = torch_load(file)
    return (found.outcome.verdict, found.outcome.why, refused) if found.outcome else (None, "", refused)


@each("name", list(REFUSED))
def test_what_torch_may_refuse_is_not_said_to_load(name: str, tmp_path: Path) -> None:
    verdict, why, refused = of_load(tmp_path / name.replace(" ", "-"), Opcodes(REFUSED[name]))

    assert refused
    assert (verdict, why[:21]) == (Verdict.UNKNOWN, "torch.load may refuse") or "no file records" in why


@each(
    "name, content",
    [
        ("version", None),
        ("version", b"3.5"),
        ("version", b"99\n"),
        ("byteorder", b"middle"),
        (".storage_alignment", b"wide"),
    ],
)
def test_what_stands_beside_a_pickle_is_judged_as_torch_reads_it(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    folder = tmp_path / f"{name}-{content!r}"
    tag = write(folder, KINDS[4])
    (file,) = tag.glob("*model_states.pt")
    with zipfile.ZipFile(file) as archive:
        entries = {each.filename: archive.read(each) for each in archive.infolist() if not each.filename.endswith(name)}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for each_name, each_content in entries.items():
            archive.writestr(each_name, each_content)
        if content is not None:
            archive.writestr(f"mp_rank_00_model_states/{name}", content)

    found = judge(look(folder), None, Plan())

    assert torch_load(file) or content == b"3.5"  # of which torch takes the beginning
    assert found.outcome is None or found.outcome.verdict is not Verdict.LOADS
    assert any(each.rule == "checkpoint-not-read" for each in found.findings), found.findings


def test_a_tag_that_torch_may_refuse_is_not_what_latest_is_repaired_to(tmp_path: Path) -> None:
    of_load(tmp_path, Opcodes(REFUSED["a call of a number"]))
    (tmp_path / "latest").unlink()

    done = run("checkpoint", str(tmp_path), "--repair")

    assert (tmp_path / "latest").exists() is False, done.stdout


def test_what_torch_loads_of_a_run_of_its_own_is_said_to_load(tmp_path: Path) -> None:
    verdict, why, refused = of_load(tmp_path, Called("argparse", "Namespace"))

    assert (verdict, refused) == (Verdict.LOADS, ""), why
