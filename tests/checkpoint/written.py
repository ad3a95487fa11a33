"""Small checkpoints in DeepSpeed's layout, written without torch: a zip as torch.save makes it, with a pickle of its opcodes.

``tests/launch/test_checkpoint.py`` holds the same judgements against checkpoints that real ranks saved.
"""

import array
import math
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsdoctor.checkpoint.folder import expert_name, layer_name, model_name, optimizer_name

CLASSES = {"F32": "FloatStorage", "I64": "LongStorage", "BF16": "BFloat16Storage"}
WIDTHS = {"F32": 4, "I64": 8, "BF16": 2}


@dataclass(frozen=True)
class Weights:
    """A tensor to be saved. ``content``: its bytes."""

    shape: tuple[int, ...]
    content: bytes
    dtype: str = "F32"


@dataclass(frozen=True)
class Called:
    """A call of a name, as DeepSpeed's own classes are pickled. ``dropped``: the result is thrown away."""

    module: str
    name: str
    arguments: tuple[Any, ...] = ()
    state: dict[str, Any] | None = None
    dropped: bool = False


@dataclass(frozen=True)
class Opcodes:
    """A value as it stands in the pickle."""

    content: bytes


def floats(values: Any) -> Weights:
    """A vector."""
    made = array.array("f", values)
    return Weights((len(made),), made.tobytes())


def save(path: Path, content: Any, *, root: str = "") -> None:
    """Write a file as torch.save does."""
    root = root or path.name.removesuffix(".pt")
    writer = _Pickler()
    data = b"\x80\x02" + writer.dump(content) + b"."
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", data)
        archive.writestr(f"{root}/byteorder", "little")
        for number, weights in enumerate(writer.storages):
            archive.writestr(f"{root}/data/{number}", weights.content)
        archive.writestr(f"{root}/version", "3\n")


class _Pickler:
    def __init__(self) -> None:
        self.storages: list[Weights] = []

    def dump(self, value: Any) -> bytes:
        if value is None:
            return b"N"
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        if isinstance(value, int):
            if -(1 << 31) <= value < 1 << 31:
                return b"J" + struct.pack("<i", value)
            content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8b" + struct.pack("<I", len(content)) + content
        if isinstance(value, Opcodes):
            return value.content
        if isinstance(value, float):
            return b"G" + struct.pack(">d", value)
        if isinstance(value, str):
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        if isinstance(value, dict):
            return b"}(" + b"".join(self.dump(k) + self.dump(v) for k, v in value.items()) + b"u"
        if isinstance(value, list):
            return b"](" + b"".join(map(self.dump, value)) + b"e"
        if isinstance(value, tuple):
            return b"(" + b"".join(map(self.dump, value)) + b"t"
        if isinstance(value, Called):
            state = b"" if value.state is None else self.dump(value.state) + b"b"
            made = b"R" if value.state is None else b"\x81"
            called = f"c{value.module}\n{value.name}\n".encode() + self.dump(value.arguments) + made + state
            return called + b"0N" if value.dropped else called
        return self.tensor(value)

    def tensor(self, weights: Weights) -> bytes:
        key, count = str(len(self.storages)), len(weights.content) // WIDTHS[weights.dtype]
        self.storages.append(weights)
        storage = b"(" + self.dump("storage") + f"ctorch\n{CLASSES[weights.dtype]}\n".encode()
        storage += self.dump(key) + self.dump("cpu") + self.dump(count) + b"tQ"
        strides = tuple(math.prod(weights.shape[place + 1 :]) for place in range(len(weights.shape)))
        rest = b"".join(map(self.dump, (0, weights.shape, strides, False, {})))
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A checkpoint to be written. ``nan``: the rank and the element of its flat weights that is one."""

    stage: int = 2
    dtype: str = "fp32"
    world: int = 2
    experts: int = 0
    pipeline: bool = False
    step: int = 2
    nan: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        more = f"-{self.experts}experts" if self.experts else "-pipeline" if self.pipeline else ""
        return f"stage{self.stage}-{self.dtype}{more}"


KINDS = (
    *(Kind(stage=stage, dtype=dtype) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")),
    Kind(stage=1, dtype="bf16", experts=2),
    Kind(stage=1, dtype="bf16", pipeline=True),
)
SHAPES = {"0.first": (3, 2), "1.second": (5,)}
COUNT = 11
EXPERTS = "moe.deepspeed_moe.experts.deepspeed_experts"


def write(folder: Path, kind: Kind, *, latest: bool = True) -> Path:
    """Write a tag of a kind, and ``latest``. The tag's folder."""
    tag = folder / f"global_step{kind.step}"
    models = range(2 if kind.pipeline else 1)
    data = kind.world // len(models)
    for model in models:
        for rank in range(data) if kind.stage == 3 else [None]:
            save(tag / model_name(rank, model), model_states(kind, data, len(models)))
        for rank in range(data) if kind.stage else ():
            save(tag / optimizer_name(rank, model, bf16=kind.dtype == "bf16"), optimizer_states(kind, rank, data))
    for expert in range(kind.experts):
        save(tag / expert_name(0, expert, 0), {f"{EXPERTS}.{expert}.weight": floats([expert])})
    for layer in range(2) if kind.pipeline else ():
        save(tag / layer_name(layer, None), {"weight": floats([layer])})
    if latest:
        (folder / "latest").write_text(tag.name)
    return tag


def _config(kind: Kind) -> dict[str, Any]:
    config: dict[str, Any] = {"zero_optimization": {"stage": kind.stage}}
    return {**config, **({kind.dtype: {"enabled": True}} if kind.dtype != "fp32" else {})}


def model_states(kind: Kind, data: int, models: int) -> dict[str, Any]:
    # the numbers of the flat weights, counted through
    numbers = iter(range(COUNT))
    whole = {
        name: Weights(shape, floats([next(numbers) for _ in range(math.prod(shape))]).content)
        for name, shape in SHAPES.items()
    }
    return {
        "module": None if kind.pipeline else {**whole, "scale": floats([1.0])},
        "buffer_names": ["scale"],
        "optimizer": None if kind.stage else {"state": {0: {"exp_avg": floats([0.5])}}},
        "param_shapes": [Called("torch", "Size", (dict(SHAPES),)).arguments[0]] if kind.stage else None,
        "shared_params": {},
        "global_steps": kind.step,
        "dp_world_size": data,
        "mp_world_size": models,
        "checkpoint_parallel_dimensions": {"pp_degree": models, "tp_degree": 1},
        "ds_config": _config(kind),
        "ds_version": "0.19.8",
        **({"num_experts": [kind.experts]} if kind.experts else {}),
    }


def address(start: int, count: int) -> Called:
    """Elements of flat weights, as DeepSpeed writes it."""
    return Called("deepspeed.utils.tensor_fragment", "fragment_address", (), {"start": start, "numel": count})


def _addresses(begin: int, count: int) -> dict[str, Called]:
    """Which elements of a rank's flat weights belong to which parameter, as DeepSpeed notes it."""
    found, offset = {}, 0
    for name, shape in SHAPES.items():
        size = math.prod(shape)
        low, high = max(offset, begin), min(offset + size, begin + count)
        if low < high:
            found[name] = address(low - begin, high - low)
        offset += size
    return found


def optimizer_states(kind: Kind, rank: int, data: int) -> dict[str, Any]:
    if kind.stage == 3:
        count = sum(math.ceil(math.prod(shape) / data) for shape in SHAPES.values())
        names = ("fp32_flat_groups", "optimizer_state_dict")
    else:
        count = -(-COUNT // data)
        names = ("single_partition_of_fp32_groups", "base_optimizer_state")
    weights = floats([float("nan") if (rank, each) == kind.nan else rank * count + each for each in range(count)])
    moments = {"step": Weights((), struct.pack("<f", kind.step)), "exp_avg": floats([0.25] * count)}
    return {
        "optimizer_state_dict": {
            names[0]: [weights],
            names[1]: {"state": {0: moments}, "param_groups": [{"lr": 0.001}]},
            "zero_stage": Called("deepspeed.runtime.zero.config", "ZeroStageEnum", (kind.stage,)),
            "partition_count": data if kind.stage == 3 else [data],
            **({} if kind.stage == 3 else {"param_slice_mappings": [_addresses(rank * count, count)]}),
        },
        "ds_version": "0.19.8",
    }
