"""Rows against the plainest truth: every element as a Python float, counted one by one."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsdoctor.overflow.frames.frame import FORMATS
from dsdoctor.overflow.measure.measure import (
    CHUNK_ROWS,
    Meter,
    backend_of,
    bad_rows,
    blank,
    blank_,
    flag,
    measurable,
    measured_view,
    scan_into,
    settled,
)
from tests.each import each
from tests.overflow.truth import numbers, planted, truth

CPU = torch.device("cpu")
BACKENDS = sorted({"torch", backend_of(CPU)})
NAMES = [form.name for form in FORMATS]
BYTES = {form.name: form.bytes for form in FORMATS}


def measured(tensor: Tensor, backend: str) -> tuple[float | None, ...]:
    meter = Meter(CPU, backend=backend)
    assert meter.scan(tensor) == 0
    view = measured_view(tensor)
    assert view is not None
    return numbers(meter.read()[0].tolist(), view.dtype)


def bits(data: bytes, name: str) -> Tensor:
    """Elements of a type from any bytes."""
    size = BYTES[name]
    padded = bytearray(data + bytes(-len(data) % size or (size if not data else 0)))
    return torch.frombuffer(padded, dtype=torch.uint8).view(getattr(torch, name))


@given(data=st.binary(max_size=96), name=st.sampled_from(NAMES), backend=st.sampled_from(BACKENDS))
def test_any_bits_are_counted_exactly(data: bytes, name: str, backend: str) -> None:
    tensor = bits(data, name)

    assert measured(tensor, backend) == truth(tensor)


@each("name", NAMES)
def test_odd_ones_are_found_wherever_they_lie(name: str) -> None:
    """Blocks of the C scan end somewhere; so do vectors."""
    dtype, size = getattr(torch, name), BYTES[name]
    block = 8192 // size
    for numel in (1, 63, block - 1, block, block + 1, 2 * block + 17):
        tensor = torch.full((numel,), 0.5).to(dtype)
        raw = tensor.view(torch.uint8)
        for at in {0, numel - 1, min(block, numel - 1), numel // 2}:
            raw[at * size : (at + 1) * size] = 0xFF if at % 2 else 0
        rows = [Meter(CPU, backend=backend) for backend in BACKENDS]
        for meter in rows:
            meter.scan(tensor)

        assert {tuple(meter.read()[0].tolist()) for meter in rows} == {tuple(rows[0].read()[0].tolist())}
        assert numbers(rows[0].read()[0].tolist(), dtype) == truth(tensor)


STRIDED: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.tensor(-3.0),
    "transposed": lambda: planted(6, 8).t(),
    "permuted": lambda: planted(2, 3, 4, 5).permute(2, 0, 3, 1),
    "part of a split": lambda: planted(40, 300)[:, 100:200],
    "one of three heads": lambda: planted(2, 8, 3, 64)[:, :, 1].transpose(1, 2),
    "every other": lambda: planted(64)[::2],
    "odd slices": lambda: planted(5, 7, 9)[1:4, ::3, 2:],
    "expanded": lambda: planted(3, 1, 16).expand(3, 5, 16),
    "expanded to a square": lambda: torch.tensor([-math.inf]).expand(4, 4),
    "windows": lambda: planted(12).unfold(0, 4, 1),
    "flipped": lambda: planted(12).flip(0),
    "channels last": lambda: planted(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "offset": lambda: planted(33)[1:],
    "negated lazily": lambda: torch._neg_view(planted(9)),
    "a parameter": lambda: torch.nn.Parameter(planted(9)),
    "half a parameter": lambda: torch.nn.Parameter(planted(2, 9))[:, :4],
    "a subclass": lambda: torch.nn.Buffer(planted(9)),
}


@each("backend", BACKENDS)
@each("name", STRIDED)
def test_strides_change_nothing(name: str, backend: str) -> None:
    tensor = STRIDED[name]()

    assert measured(tensor, backend) == truth(tensor)


@each("backend", BACKENDS)
def test_a_complex_tensor_is_its_parts(backend: str) -> None:
    tensor = torch.complex(planted(7), torch.full((7,), -math.inf))

    assert measured(tensor, backend) == truth(torch.view_as_real(tensor))
    assert measured(tensor.conj(), backend) == truth(torch.view_as_real(tensor.conj().resolve_conj()))
    assert measured(tensor.conj().imag, backend) == truth(torch.full((7,), math.inf))


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@each("backend", BACKENDS)
def test_sparse_and_nested_tensors_are_their_values(backend: str) -> None:
    dense = torch.tensor([[0.0, math.inf], [2.0, 0.0]])
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, 3), math.nan)])

    for tensor in (dense.to_sparse(), dense.to_sparse_csr()):
        assert measured(tensor, backend) == (0, 1, 0, 0, 0, 2.0, 2.0, 2.0)
    assert measured(nested, backend) == (12, 0, 0, 0, 0, 1.0, 1.0, 1.0)


@pytest.mark.launch  # for its imports: seconds
@pytest.mark.parametrize("backend", BACKENDS)
def test_jagged_and_distributed_tensors_are_what_lies_here(backend: str, tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, 3), math.nan)], layout=torch.jagged)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(planted(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
        assert measured(sharded, backend) == truth(planted(4, 4))
    finally:
        distributed.destroy_process_group()

    assert measured(jagged, backend) == (12, 0, 0, 0, 0, 1.0, 1.0, 1.0)


def nothing() -> dict[str, object]:
    """What has no numbers to measure."""
    return {
        "integers": torch.ones(3, dtype=torch.int64),
        "booleans": torch.ones(3, dtype=torch.bool),
        "empty": torch.empty(0, 4),
        "meta": torch.ones(3, device="meta"),
        "no zeros yet": torch._efficientzerotensor((3,)),
        "lazy": torch.nn.UninitializedParameter(),
        "mkldnn": torch.ones(2, 2).to_mkldnn(),
    }


@each("backend", BACKENDS)
def test_what_has_no_numbers_takes_no_row(backend: str) -> None:
    meter = Meter(CPU, backend=backend)

    for name, tensor in nothing().items():
        assert not measurable(tensor), name
        assert meter.scan(tensor) == -1, name  # type: ignore[arg-type]
        meter.scan(torch.ones(1))
    assert meter.used == len(nothing())
    assert not measurable(None)
    assert not measurable(3.0)


@pytest.mark.launch  # for its imports: seconds
def test_a_fake_tensor_takes_no_row() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        assert not measurable(torch.ones(3))
        assert Meter(CPU).scan(mode.from_tensor(torch.ones(3))) == -1


@pytest.mark.launch  # for its imports: seconds
@each("backend", BACKENDS)
def test_wrappers_of_torch_func_are_left_alone(backend: str) -> None:
    meter = Meter(CPU, backend=backend)
    seen = []

    def body(x: Tensor) -> Tensor:
        seen.append(meter.scan(x))
        return (x * x).sum()

    torch.func.grad(body)(torch.ones(3))
    torch.func.vmap(body)(torch.ones(3, 3))

    assert seen == [-1, -1]


@each("backend", BACKENDS)
def test_rows_are_taken_in_order_and_used_again(backend: str) -> None:
    meter = Meter(CPU, backend=backend)

    first = [meter.scan(torch.tensor([float(number)])) for number in (1, 2)] + [meter.scan(torch.tensor([math.nan]))]
    bad = bad_rows(meter.read())
    meter.rewind()

    assert (first, bad, meter.used, meter.read().shape) == ([0, 1, 2], [2], 0, (0, 8))
    assert meter.scan(torch.tensor([4.0])) == 0
    assert numbers(meter.read()[0].tolist(), torch.float32) == (0, 0, 0, 0, 0, 4.0, 4.0, 4.0)


def test_many_rows_outgrow_a_chunk() -> None:
    meter = Meter(CPU)
    tensor, odd = torch.ones(4), torch.ones(8, 2).t()[:1]

    for step in range(2):
        meter.rewind()
        for number in range(CHUNK_ROWS + 5):
            assert meter.scan(odd if number == CHUNK_ROWS + step else tensor) == number
        rows = meter.read()
        assert rows.shape == (CHUNK_ROWS + 5, 8)
        assert bool((rows == rows[0]).all())


def test_a_row_without_finite_elements_says_so() -> None:
    meter = Meter(CPU)
    meter.scan(torch.tensor([math.inf, math.nan]))
    meter.scan(torch.zeros(3))

    assert meter.read().tolist() == [[1, 1, 0, 0, 0, -1, -1, -1], [0, 0, 0, 3, 0, 0, 0, -1]]


def test_a_meter_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="triton does not measure on cpu"):
        Meter(CPU, backend="triton")


def test_nothing_of_autograd_remains() -> None:
    weight = torch.nn.Parameter(planted(4, 4))
    meter = Meter(CPU)

    with torch.inference_mode():
        meter.scan(weight.t())
    meter.scan(weight[:, :2])

    assert not meter.read().requires_grad


@each("name", NAMES)
def test_a_flag_knows_only_whether(name: str) -> None:
    dtype = getattr(torch, name)
    good = torch.ones(3).to(dtype)
    bad = torch.tensor([1.0, math.nan]).to(dtype)

    assert [bool(flag(good)), bool(flag(bad)), bool(flag(torch.ones(2, dtype=torch.int32)))] == [False, True, False]
    assert flag(good[0]).shape == ()


def test_scan_into_merges() -> None:
    ring = blank(2, CPU)

    scan_into(ring, 1, torch.tensor([3.0, math.nan]))
    scan_into(ring, 1, torch.tensor([1.0, 0.0], requires_grad=True).expand(2, 2))
    scan_into(ring, 0, torch.ones(2, dtype=torch.int64))

    assert settled(ring)[0].tolist() == [0, 0, 0, 0, 0, -1, -1, -1]
    assert numbers(settled(ring)[1].tolist(), torch.float32) == (1, 0, 0, 2, 0, 3.0, 0.0, 1.0)
    assert blank_(ring).equal(blank(2, CPU))


def test_a_ring_of_another_make_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous int64"):
        scan_into(torch.zeros(2, 8), 0, torch.ones(1))
    with pytest.raises(IndexError, match="row 2 of 2"):
        scan_into(blank(2, CPU), 2, torch.ones(1))


@pytest.mark.launch  # for its imports: seconds
@each("compiler", ["eager", "aot_eager"])
def test_scan_into_is_part_of_a_compiled_graph(compiler: str) -> None:
    """fullgraph: a break would raise."""
    model, ring = torch.nn.Linear(4, 4), blank(1, CPU)

    def hook(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        with torch.no_grad():
            scan_into(ring, 0, output)

    model.register_forward_hook(hook)
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    out = compiled(torch.full((2, 4), math.inf, requires_grad=True))
    compiled(torch.ones(2, 4)).sum().backward()

    assert out.shape == (2, 4)
    assert model.weight.grad is not None
    row = settled(ring)[0].tolist()
    assert sum(row[:3]) == 8
    assert row[5] > 0


def broken_triton(folder: Path) -> Path:
    """An installation of Triton that fails when it is imported, as one without its compiler does."""
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").write_text("raise OSError('cannot find a C compiler')\n")
    return folder


BROKEN = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from dsdoctor.overflow.measure.measure import Meter, why_no_kernel
cpu = torch.device("cpu")
meter = Meter(cpu, backend="torch")
meter.backend = "triton"
meter.scan(torch.tensor([1.0, float("nan")]))
meter.scan(torch.tensor([float("inf"), 3.0]))
print(why_no_kernel(cpu), meter.backend, meter.read()[:, :2].tolist(), sep="|")
"""


@pytest.mark.slow  # a process that imports torch
def test_a_kernel_that_does_not_run_is_replaced_and_the_reason_is_known(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", BROKEN, str(broken_triton(tmp_path))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True, cwd=Path(__file__).parents[2])

    assert done.stdout.strip() == "OSError: cannot find a C compiler|torch|[[1, 0], [0, 1]]"
