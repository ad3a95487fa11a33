"""The Triton kernel, the meter and the compiled operator on a real GPU."""

import math

import pytest
import torch

from dsdoctor.overflow.measure.measure import CHUNK_ROWS, Meter, bad_rows, blank, flag, scan_into, settled
from tests.overflow.test_kernel import cases, wrong
from tests.overflow.truth import planted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_the_kernel_tells_the_truth() -> None:
    assert wrong(cases(), "cuda") == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2])
def test_large_tensors_measure_as_on_the_cpu(dtype: torch.dtype) -> None:
    host = torch.randn(3_000_017).relu_().to(dtype)
    host[12345:12355] = math.inf
    meters = [Meter(CUDA), Meter(CPU)]

    for meter in meters:
        for tensor in (host, host[:3_000_000].view(1000, 3000)[:, :1000], host[:3_000_000].view(1000, 3000).t()):
            meter.scan(tensor.to(meter.device, copy=True) if tensor.is_contiguous() else tensor.to(meter.device))

    assert meters[0].backend == "triton"
    assert meters[0].read().equal(meters[1].read())


def test_scanning_and_rewinding_never_wait_for_the_gpu() -> None:
    meter = Meter(CUDA)
    tensors = [torch.full((100 + each,), float(each + 1), device=CUDA) for each in range(50)]
    meter.scan(tensors[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        meter.rewind()
        rows = [meter.scan(tensor) for tensor in tensors]
        bad = flag(tensors[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert rows == list(range(50))
    assert not bad
    assert meter.read()[:, 5].tolist() == torch.arange(1.0, 51.0).view(torch.int32).tolist()


def test_rows_are_used_again_and_outgrow_a_chunk() -> None:
    meter = Meter(CUDA)
    good, bad = torch.ones(4, device=CUDA), torch.full((4,), math.nan, device=CUDA)

    for step in range(2):
        meter.rewind()
        for number in range(CHUNK_ROWS + 5):
            meter.scan(bad if number == CHUNK_ROWS + step else good)
        assert bad_rows(meter.read()) == [CHUNK_ROWS + step]


def test_more_elements_than_an_int32_counts() -> None:
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of free GPU memory")
    tensor = torch.ones((1 << 31) + 4097, dtype=torch.float8_e5m2, device=CUDA).view(torch.uint8)
    tensor[-1], tensor[0], tensor[1 << 31] = 0, 0x7C, 0x7F
    meter = Meter(CUDA)
    meter.scan(tensor.view(torch.float8_e5m2))

    assert meter.read()[0].tolist() == [1, 1, 0, 1, 0, 0x3C, 0, 0x3C]


def test_views_that_are_no_runs_are_copied() -> None:
    meters = [Meter(CUDA), Meter(CPU)]
    for meter in meters:
        meter.scan(planted(12).to(meter.device).unfold(0, 4, 1))
        meter.scan(planted(4, 5, 6).to(meter.device)[:2, :3, :4])

    assert meters[0].read().equal(meters[1].read())


def test_the_operator_in_a_compiled_model() -> None:
    model, ring = torch.nn.Linear(64, 64, device=CUDA), blank(1, CUDA)

    def hook(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        with torch.no_grad():
            scan_into(ring, 0, output)

    model.register_forward_hook(hook)
    compiled = torch.compile(model, fullgraph=True)
    compiled(torch.ones(2, 64, device=CUDA)).sum().backward()
    compiled(torch.full((2, 64), math.inf, device=CUDA))

    assert settled(ring)[0, :3].sum() == 128
    assert settled(ring)[0, 5] > 0
