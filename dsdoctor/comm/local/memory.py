"""A real allocation on a device, written and read back; and a finding where that fails. Runs in the data process."""

from collections.abc import Iterator, Mapping

from dsdoctor.comm.rank_names import named
from dsdoctor.comm.results import MemoryTry
from dsdoctor.core.finding import Finding
from dsdoctor.core.fix import step

MIB, GIB = 1 << 20, 1 << 30
SIZE = 256 * MIB
ON_CPU = 16 * MIB
BLOCK = 16 * MIB
"""Bytes that go to the device and back at a time."""


def try_memory(device: str, size: int = SIZE) -> MemoryTry:
    """Allocate ``size`` bytes on a device ("cuda:1"; on "cpu" at most 16 MiB), write a pattern, read it back, compare."""
    import torch

    size = min(size, ON_CPU) if device == "cpu" else size
    free = total = None
    try:
        if device != "cpu":
            free, total = torch.cuda.mem_get_info(device)
        wrong = _written_and_read(device, max(1, size // BLOCK), min(size, BLOCK) // 4)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        return MemoryTry(device=device, size=size, free=free, total=total, error=reason[:300])
    return MemoryTry(device=device, size=size, free=free, total=total, wrong=wrong)


def _written_and_read(device: str, blocks: int, length: int) -> int:
    """How many numbers came back different from what was written. Each block has values of its own."""
    import torch

    pattern = torch.arange(length, dtype=torch.int32)
    there = torch.empty((blocks, length), dtype=torch.int32, device=device)
    for block in range(blocks):
        there[block].copy_(pattern + block)
    wrong = 0
    for block in range(blocks):
        back = there[block].cpu()
        if not torch.equal(back, pattern + block):
            wrong += int((back != pattern + block).sum())
    return wrong


def gpu_memory_unusable(tries: Mapping[int, MemoryTry], hosts: tuple[str, ...]) -> Iterator[Finding]:
    """A GPU's memory could not be allocated, or gave back other data than was written.

    Why it matters: free memory that NVML reports is not always memory that can be used: partitions, an exclusive
    compute mode, or a GPU that fell off the bus. Wrong data means a broken GPU: do not use it, whatever the rest of the
    test says.

    How to fix it: see who holds the GPU and whether its mode allows two processes. Take a GPU that returns wrong data
    out of the job.

        $ nvidia-smi -q -d ECC,ROW_REMAPPER
        $ sudo dmesg | grep -i xid

    Since: 0.1
    """
    for rank, done in sorted(tries.items()):
        if done.error is None and not done.wrong:
            continue
        free = (
            f"{done.free / GIB:.1f} of {(done.total or 0) / GIB:.1f} GiB free"
            if done.free is not None
            else "free memory unknown"
        )
        where = named((rank,), hosts)
        what = f": {done.wrong} numbers came back wrong" if done.wrong else " could not be allocated"
        yield Finding.error(
            "gpu-memory-unusable",
            f"{where}: {done.size / MIB:.0f} MiB on {done.device}{what}",
            evidence=tuple(text for text in (done.error, free) if text),
            fix="do not use that GPU"
            if done.wrong
            else "see who holds the GPU, and whether its mode allows two processes",
            steps=(step("nvidia-smi -q -d ECC,ROW_REMAPPER"), step("sudo dmesg | grep -i xid"))
            if done.wrong
            else (step("nvidia-smi"),),
        )


def examine(tries: Mapping[int, MemoryTry], hosts: tuple[str, ...]) -> tuple[Finding, ...]:
    """Every finding about the allocations of all ranks, by rank."""
    return tuple(finding for check in CHECKS for finding in check(tries, hosts))


CHECKS = (gpu_memory_unusable,)
