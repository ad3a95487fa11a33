"""The Triton kernel in Triton's interpreter, in one child process: the variable that asks for it is read at import."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsdoctor.overflow.frames.frame import FORMATS
from tests.overflow.truth import numbers, planted, truth

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(not (find_spec("triton") and find_spec("numpy")), reason="triton or numpy is missing")


def cases() -> Iterator[tuple[str, Tensor]]:
    """Every type: a tile without odd ones, a tile of any bits, a short one; then the sizes and strides there are."""
    torch.manual_seed(0)
    for form in FORMATS:
        dtype, tile = getattr(torch, form.name), min(4096, 8192 // form.bytes)
        raw = torch.randint(-128, 128, ((tile + 7) * form.bytes,), dtype=torch.int8)
        yield form.name, torch.cat((torch.linspace(1, 2, tile).to(dtype).view(torch.int8), raw)).view(dtype)
    half = planted(64, 64).half()
    yield "scalar", torch.tensor(0.5, dtype=torch.float64)
    yield "no odd ones", torch.linspace(1, 2, 2049)
    yield "odd ones", planted(9, 9)
    yield "only nan", torch.full((5,), torch.nan)
    yield "zeros", torch.zeros(3000)
    yield "transposed", half.t()
    yield "vectors in runs", planted(100, 128).bfloat16()[:, 16:80]
    yield "odd runs", half[:, 3:50]
    yield "expanded", half[:, None].expand(64, 3, 64)
    yield "off by one", half.view(-1)[1:]


def wrong(tensors: Iterator[tuple[str, Tensor]], device: str) -> list[str]:
    """The cases in which the kernel, on a device, says anything but the truth."""
    from dsdoctor.overflow.measure.measure import blank, settled
    from dsdoctor.overflow.measure.rows import FORMAT_OF, span
    from dsdoctor.overflow.measure.triton_kernel import launch

    found = []
    for name, host in tensors:
        there = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        there = host if device == "cpu" else there.copy_(host) if 0 not in host.stride() else host.to(device)
        place = span(there.shape, there.stride())
        assert place is not None
        ring = blank(3, there.device)
        launch(there, place, FORMAT_OF[host.dtype], ring, 1)
        rows = settled(ring)
        if numbers(rows[1].tolist(), host.dtype) != truth(host):
            found.append(f"{name}: {numbers(rows[1].tolist(), host.dtype)} is not {truth(host)}")
        if not rows[0].equal(rows[2]) or rows[0, :5].any():
            found.append(f"{name}: wrote beside its row")
    return found


def merged() -> list[int]:
    """Two tensors in one row."""
    from dsdoctor.overflow.measure.measure import blank, settled
    from dsdoctor.overflow.measure.rows import FORMAT_OF, Span
    from dsdoctor.overflow.measure.triton_kernel import launch

    ring = blank(1, torch.device("cpu"))
    for values in ([0.0, 2.0], [0.0, float("nan")]):
        launch(torch.tensor(values), Span(2), FORMAT_OF[torch.float32], ring, 0)
    return settled(ring)[0].tolist()


@needs_triton
def test_the_kernel_tells_the_truth() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}

    child = subprocess.run(
        [sys.executable, "-m", "tests.overflow.test_kernel"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (child.stdout, child.returncode) == ("", 0), child.stderr


COMPILES = """
import re
from triton import compile as build
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dsdoctor.overflow.measure import triton_kernel as kernel
from dsdoctor.overflow.frames.frame import BY_NAME
from dsdoctor.overflow.measure.rows import Span
for name, place in (("bfloat16", Span(1 << 20)), ("float32", Span(1 << 31)), ("float16", Span(768, 4096, 2304))):
    fixed = kernel.constants(BY_NAME[name], place)
    kinds = {"data": "*i32" if name == "float32" else "*i16", "ring": "*i64"}
    kinds |= {each: "i64" if fixed["WIDE"] else "i32" for each in kernel.ARGUMENTS} | dict.fromkeys(fixed, "constexpr")
    at = {(kernel._scan.arg_names.index(each),): value for each, value in fixed.items()}
    aligned = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
    source = ASTSource(fn=kernel._scan, signature=kinds, constexprs=at, attrs=aligned)
    options = {"num_warps": kernel.WARPS, "enable_fp_fusion": False}
    ptx = build(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "ld.global.v4.b32" in ptx, f"{name}: a thread does not load 16 bytes at once"
    atomics = set(re.findall(r"(?:red|atom)[.]global[.]([a-z]+[.][a-z]+[.][a-z]+)", ptx))
    assert atomics == {f"gpu.relaxed.{what}" for what in ("add", "max", "min")}, atomics
"""


@needs_triton
@pytest.mark.launch  # compiles for seconds
def test_the_kernel_compiles_for_a_gpu_that_is_not_here() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}

    child = subprocess.run([sys.executable, "-c", COMPILES], env=env, capture_output=True, text=True, check=False)

    assert child.returncode == 0, child.stderr


if __name__ == "__main__":
    for complaint in wrong(cases(), "cpu"):
        print(complaint)
    if merged() != [1, 0, 0, 2, 0, 0x40000000, 0, 0x40000000]:
        print(f"merging two tensors: {merged()}")
