"""Real ranks of gloo exchange everything in the catalogue; a bit is flipped for real in one of them, and its name comes out.

`python -m pytest -m launch tests/comm/test_collectives.py` takes a minute.
"""

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsdoctor.comm.collectives.calls import COLLECTIVES, EXACT, Reduction, largest, rounds, spread_rounds, steps
from dsdoctor.comm.collectives.run import lacking
from dsdoctor.comm.models import Mode, RankGroup
from dsdoctor.comm.results import Exchange

WORKER = Path(__file__).with_name("collectives_worker.py")
FAULT = '''
"""Flips a bit in what this rank gives to the collectives named in FAULT, as broken memory or a broken link would."""
import os
import torch
import torch.distributed as dist

left = [int(os.environ.get("FLIPS", "1000000"))]

def flip(tensor):
    if left[0] > 0 and tensor.numel() > 5:
        left[0] -= 1
        tensor.view(torch.uint8)[len(tensor) // 2 * tensor.element_size()] ^= 1 << 2
    return tensor

def spoil(name, place):
    original = getattr(dist, name)
    def spoilt(*args, **kwargs):
        args = list(args)
        args[place] = flip(args[place] if name in ("all_reduce", "reduce", "broadcast") else args[place].clone())
        return original(*args, **kwargs)
    setattr(dist, name, spoilt)

def spoil_batch():
    original = dist.batch_isend_irecv
    def spoilt(ops):
        for op in ops:
            if op.op is dist.isend:
                op.tensor = flip(op.tensor.clone())
        return original(ops)
    dist.batch_isend_irecv = spoilt

for name in os.environ.get("FAULT", "").split():
    if name == "batch_isend_irecv":
        spoil_batch()
    elif hasattr(dist, name):
        spoil(name, 1 if name.startswith(("reduce_scatter", "all_gather", "all_to_all")) else 0)
'''


def exchanges(
    folder: Path, world: int, mode: str = "quick", what: str = "right", bad: int | None = None, **fault: str
) -> list[tuple[Exchange, ...]]:
    """What each rank saw; ``bad`` runs with a sitecustomize of its own."""
    (folder / "bad").mkdir()
    (folder / "bad" / "sitecustomize.py").write_text(FAULT)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    ranks = []
    for rank in range(world):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": port}
        if rank == bad:
            env |= {"PYTHONPATH": str(folder / "bad"), **fault}
        argv = [sys.executable, str(WORKER), what, mode, str(folder / f"{rank}.json")]
        with (folder / f"{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log))
    try:
        codes = [rank.wait(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * world, "\n".join((folder / f"{rank}.log").read_text()[-2000:] for rank in range(world))
    files = ((folder / f"{rank}.json").read_bytes() for rank in range(world))
    return [msgspec.json.decode(text, type=tuple[Exchange, ...]) for text in files]


def wrong(seen: list[tuple[Exchange, ...]]) -> Iterator[Exchange]:
    return (exchange for exchange in chain(*seen) if exchange.wrong is not None)


@pytest.mark.launch
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_record_is_right_on_healthy_ranks(tmp_path: Path, world: int) -> None:
    seen = exchanges(tmp_path, world, "default")

    assert [
        (exchange.op, exchange.wrong, exchange.skipped)
        for exchange in chain(*seen)
        if exchange.wrong or exchange.skipped
    ] == []
    names = {exchange.op for exchange in seen[0]}
    assert all(any(op.startswith(record.name) for op in names) for record in COLLECTIVES)


@pytest.mark.launch
@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed")
def test_deepspeeds_layer_is_right_and_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extensions = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    seen = exchanges(tmp_path, 2, what="deepspeed")

    assert not extensions.exists() or not list(extensions.iterdir())

    assert [
        (exchange.op, exchange.wrong, exchange.skipped)
        for exchange in chain(*seen)
        if exchange.wrong or exchange.skipped
    ] == []
    assert {exchange.op.split()[1] for exchange in seen[0]} == {"all_reduce", "all_gather", "reduce_scatter"}


@pytest.mark.launch
@pytest.mark.parametrize(
    "world, bad, fault, ops",
    [
        (2, 1, "all_reduce", {"all_reduce"}),
        (4, 2, "all_reduce reduce", {"all_reduce", "reduce"}),
        (4, 3, "reduce_scatter_single reduce_scatter_tensor", {"reduce_scatter"}),
        (4, 0, "all_gather_single all_gather_into_tensor", {"all_gather"}),
        (4, 3, "all_to_all_single broadcast", {"all_to_all", "broadcast"}),
        (2, 0, "send", {"send"}),
        (4, 2, "send batch_isend_irecv", {"send"}),
    ],
)
def test_the_rank_whose_bit_was_flipped_is_named(
    tmp_path: Path, world: int, bad: int, fault: str, ops: set[str]
) -> None:
    seen = exchanges(tmp_path, world, bad=bad, FAULT=fault)

    found = list(wrong(seen))
    assert {exchange.op.split()[0] for exchange in found} == ops
    told = [exchange for exchange in found if exchange.wrong and exchange.wrong.again is not None]
    assert told and {exchange.wrong.whose for exchange in told if exchange.wrong} == {(bad,)}, told
    assert all(exchange.wrong.count >= 1 for exchange in found if exchange.wrong)


@pytest.mark.launch
def test_a_bit_that_flips_once_is_reported_and_nobody_is_blamed(tmp_path: Path) -> None:
    found = list(wrong(exchanges(tmp_path, 2, bad=1, FAULT="all_reduce", FLIPS="1")))

    assert [(exchange.wrong.whose, exchange.wrong.again) for exchange in found if exchange.wrong] == [((), False)] * 2


@given(st.sampled_from(sorted(EXACT)), st.integers(1, 3000), st.sampled_from([None, Reduction.SUM, Reduction.AVG]))
def test_the_sum_of_all_ranks_is_exact_in_every_dtype(dtype: str, world: int, reduction: Reduction | None) -> None:
    most, every = largest(dtype, world, reduction)

    ranks = 1 if reduction is None else -(-world // every)
    assert most >= 2 and most * ranks <= EXACT[dtype]


@given(st.integers(2, 70))
def test_in_each_round_everybody_has_one_partner_and_in_all_everybody_meets(world: int) -> None:
    pairs = [pair for turn in rounds(world) for pair in turn]

    assert all(len({*chain(*turn)}) == 2 * len(turn) for turn in rounds(world))
    assert sorted(pairs) == sorted(combinations(range(world), 2))


def test_above_64_ranks_each_meets_some_others_only() -> None:
    turns = spread_rounds(1000)

    assert len(turns) == 16 == len({turn[0] for turn in turns})
    assert {len({*chain(*turn)}) for turn in turns} == {1000}


def test_the_steps_are_the_same_on_every_rank_and_more_is_asked_for_in_each_mode() -> None:
    first, last = (RankGroup(rank=rank, world=8, device="cpu", backend="gloo") for rank in (0, 7))

    assert steps(Mode.FULL, first) == steps(Mode.FULL, last)
    assert [len(steps(mode, first)) for mode in Mode] == sorted(len(steps(mode, first)) for mode in Mode)


@pytest.mark.parametrize(
    "message, is_lacking",
    [
        ("Cannot use ReduceOp.AVG with Gloo", True),
        ("ProcessGroupGloo does not support reduce_scatter", True),
        ("Input tensor data type is not supported for NCCL process group: Half", True),
        ("Invalid scalar type", True),
        ("[enforce fail at tcp.cc:112] Connection reset by peer", False),
        ("Timed out waiting 15000ms for recv operation to complete", False),
        ("socket: Address family not supported by protocol", False),
    ],
)
def test_a_backend_that_cannot_is_told_from_one_that_broke(message: str, is_lacking: bool) -> None:
    assert (lacking(RuntimeError(message)) is not None) is is_lacking
