"""The scan of one tensor beside what it replaces: alternating rounds in one process, the best of each.

    python benchmarks/scan.py [--elements 1024 65536 4194304] [--rounds 15] [--device cpu|cuda] [--json FILE]

Peers: ``torch.aminmax`` (sees neither counts nor, through a nan, a range), and what transformers' DebugUnderflowOverflow
does with every tensor: abs, min, max, isnan, isinf, each with its sync. On CUDA also a device-to-device copy, which reads
and writes as many bytes, and ``host``: the time until the call returns, without waiting for the GPU. One CPU thread.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dsdoctor.overflow.measure.measure import Meter

CALL_SECONDS = 0.02  # a round repeats a call for about so long
TYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn")
DATA: dict[str, Callable[[int], Tensor]] = {
    "normal": torch.randn,
    "half zeros": lambda elements: torch.randn(elements).relu(),
    "some inf": lambda elements: torch.randn(elements).index_fill_(0, torch.arange(0, elements, 997), torch.inf),
}


def transformers_sequence(tensor: Tensor) -> tuple[float, float, bool, bool]:
    """The operations of the guide's class on one tensor."""
    sizes = tensor.abs()
    return sizes.min().item(), sizes.max().item(), torch.isnan(tensor).any().item(), torch.isinf(tensor).any().item()  # type: ignore[return-value]


def scanner(device: torch.device, backend: str | None = None) -> Callable[[Tensor], object]:
    """One row after another, as a training step takes them."""
    meter = Meter(device, backend=backend)

    def scan(tensor: Tensor) -> None:
        if meter.used == 1000:
            meter.rewind()
        meter.scan(tensor)

    return scan


def seconds(call: Callable[[Tensor], object], tensor: Tensor, repeats: int, *, wait: bool) -> float:
    """Per call; ``wait`` for the GPU at the end."""
    started = time.perf_counter()
    for _ in range(repeats):
        call(tensor)
    if wait and tensor.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def compare(calls: dict[str, Callable[[Tensor], object]], tensor: Tensor, rounds: int) -> dict[str, float]:
    """The best time of each call, the calls taking turns; those that the type does not have are left out."""
    repeats, best = {}, {}
    for name, call in calls.items():
        try:
            seconds(call, tensor, 2, wait=True)
        except (RuntimeError, NotImplementedError):
            continue
        once = max(seconds(call, tensor, 2, wait=True), 1e-7)
        repeats[name] = min(20_000, max(1, int(CALL_SECONDS / once)))
    for _ in range(rounds):
        for name, count in repeats.items():
            taken = seconds(calls[name], tensor, count, wait=name != "host")
            best[name] = min(taken, best.get(name, taken))
    return best


def table(device: torch.device, elements: list[int], rounds: int) -> list[dict[str, object]]:
    """A line for each size, type and kind of data."""
    meter = Meter(device)
    calls: dict[str, Callable[[Tensor], object]] = {
        f"scan ({meter.backend})": scanner(device),
        "scan (torch)": scanner(device, "torch"),
        "aminmax": torch.aminmax,
        "transformers": transformers_sequence,
    }
    if device.type == "cuda":
        calls |= {"copy": torch.clone, "host": scanner(device)}
    lines = []
    for count in elements:
        for name in TYPES:
            for data, make in DATA.items():
                torch.manual_seed(0)
                tensor = make(count).to(getattr(torch, name)).to(device)
                best = compare(calls, tensor, rounds)
                ours = best[f"scan ({meter.backend})"]
                lines.append(
                    {
                        "elements": count,
                        "dtype": name,
                        "data": data,
                        "us": {call: round(taken * 1e6, 2) for call, taken in best.items()},
                        "GB_per_s": round(tensor.nbytes / ours / 1e9, 1),
                        "ratio": {call: round(taken / ours, 1) for call, taken in best.items()},
                    }
                )
                show(lines[-1])
    return lines


def show(line: dict[str, object]) -> None:
    """One line of the table: microseconds, and how many times ours that is."""
    us, ratio = line["us"], line["ratio"]
    assert isinstance(us, dict)
    assert isinstance(ratio, dict)
    cells = "  ".join(f"{call} {us[call]:.2f} us ({ratio[call]}x)" for call in us)
    print(
        f"{line['elements']:>9} {line['dtype']:<14} {line['data']:<10} {line['GB_per_s']:>7} GB/s  {cells}", flush=True
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=[1024, 65536, 4 << 20])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(given.device)
    with torch.no_grad():
        lines = table(device, given.elements, given.rounds)
    result = {
        "lines": lines,
        "backend": Meter(device).backend,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
