"""Machine -> findings about GPUs, driver and architectures."""

from collections.abc import Iterator

from dsdoctor.checks.python import other_torch
from dsdoctor.core import machine as needs
from dsdoctor.core.architectures import check_known, compiled_by, numeric, order, parse_architectures, plain
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import OLDEST_DRIVER, Machine
from dsdoctor.rules import book

ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")
"""The names that DeepSpeed knows (0.19.8, accelerator/real_accelerator.py)."""

ARCH_VARIABLE = "TORCH_CUDA_ARCH_LIST"
KNOWS_DEFAULTS = (11, 12)
"""CUDA majors whose nvcc still takes DeepSpeed's built-in architecture list."""


def summary(machine: Machine) -> str:
    """One line for the topic."""
    if machine.driver is None:
        silent = any(gap.question == "gpus" for gap in machine.gaps)
        return "GPU: the NVIDIA driver does not respond" if silent else "GPU: no NVIDIA driver"
    runs = f"driver {machine.driver.version}, supports CUDA up to {machine.driver.cuda}"
    names = sorted({f"{gpu.name} ({gpu.capability})" for gpu in machine.gpus})
    return f"GPU: {len(machine.gpus)} x {', '.join(names)}; {runs}" if names else f"GPU: none; {runs}"


def driver_silent(machine: Machine) -> Iterator[Finding]:
    """There is an NVIDIA driver, and it does not answer."""
    for gap in machine.gaps:
        if gap.question == "gpus":
            yield book.finding("driver-silent", Severity.ERROR, reason=gap.reason)


def driver_too_old(machine: Machine) -> Iterator[Finding]:
    """The NVIDIA driver is too old for the CUDA release that torch was built with."""
    torch, driver = machine.torch, machine.driver
    if not torch or not torch.cuda or not driver or not driver.cuda or driver.cuda >= torch.cuda:
        return
    compatible = driver.cuda.major == torch.cuda.major
    least = OLDEST_DRIVER.get(torch.cuda.major)
    yield book.finding(
        "driver-too-old",
        Severity.NOTE if compatible else Severity.ERROR,
        case="minor" if compatible else "",
        driver=driver.version,
        runs=str(driver.cuda),
        torch=str(torch.cuda),
        least=least,
        major=driver.cuda.major,
    )


def gpu_not_in_torch(machine: Machine) -> Iterator[Finding]:
    """torch holds no code for a GPU that is here."""
    torch = machine.torch
    if not torch or not torch.arch_list:
        return
    for capability in numeric([gpu.capability for gpu in machine.visible_gpus]):
        by_ptx = any(order(built) <= order(capability) for built in numeric(torch.ptx))
        if not by_ptx and not any(_runs(built, capability) for built in numeric(torch.arch_list)):
            yield book.finding(
                "gpu-not-in-torch",
                Severity.ERROR,
                capability=capability,
                torch=torch.version,
                architectures=torch.arch_list,
                steps=(other_torch(machine),),
            )


def gpu_arch_unsupported_by_nvcc(machine: Machine) -> Iterator[Finding]:
    """nvcc does not compile for some of the architectures that are wanted."""
    taken, wanted = machine.taken, _wanted(machine)
    if taken is None or taken.release is None or taken.nvcc is None:
        return
    major = taken.release.major
    lost = [entry for entry in wanted if not compiled_by(entry, taken.architectures, major)]
    if lost:
        yield book.finding(
            "gpu-arch-unsupported-by-nvcc",
            Severity.ERROR,
            case="" if machine.variables.get(ARCH_VARIABLE) else "gpus",
            evidence=[f"{taken.nvcc} supports {', '.join(numeric(taken.architectures))}"]
            if taken.architectures
            else [],
            affects=(needs.DEVICE_CODE,),
            nvcc=str(taken.release),
            lost=lost,
            architectures=";".join(_fitting(machine)),
        )


def gpu_arch_unknown_to_torch(machine: Machine) -> Iterator[Finding]:
    """TORCH_CUDA_ARCH_LIST holds something that torch or DeepSpeed cannot read."""
    text = machine.variables.get(ARCH_VARIABLE, "").strip()
    torch = machine.torch
    if not text or not torch or not torch.cuda:
        return
    try:
        check_known(parse_architectures(text), torch.known_architectures)
    except UsageError as wrong:
        yield book.finding(
            "gpu-arch-unknown-to-torch",
            Severity.ERROR,
            affects=(needs.CUDA,),
            text=text,
            problem=wrong.message,
            hint=wrong.hint,
            capabilities=";".join(numeric([gpu.capability for gpu in machine.visible_gpus])),
        )


def arch_list_empty(machine: Machine) -> Iterator[Finding]:
    """No GPU is visible and TORCH_CUDA_ARCH_LIST is not set, so nothing says for which GPU to compile."""
    torch, taken = machine.torch, machine.taken
    if not torch or not torch.cuda or machine.visible_gpus or machine.variables.get(ARCH_VARIABLE, "").strip():
        return
    if machine.variables.get("DS_ACCELERATOR", "cuda") != "cuda":
        return
    cuda = taken.release if taken and taken.release else torch.cuda
    refused = cuda.major not in KNOWS_DEFAULTS
    yield book.finding(
        "arch-list-empty",
        Severity.WARNING,
        case="" if refused else "old",
        evidence=["CUDA_VISIBLE_DEVICES hides every GPU"] if machine.gpus else [],
        affects=(needs.DEVICE_CODE,) if refused else (),
        nvcc=str(cuda),
    )


def accelerator_autodetect_cpu(machine: Machine) -> Iterator[Finding]:
    """No GPU is visible and DS_ACCELERATOR is not set, so DeepSpeed chooses the CPU accelerator."""
    torch = machine.torch
    if torch and torch.cuda and not machine.visible_gpus and not machine.variables.get("DS_ACCELERATOR"):
        yield book.finding("accelerator-autodetect-cpu", Severity.WARNING, affects=(needs.CUDA,), torch=torch.version)


def accelerator_name_invalid(machine: Machine) -> Iterator[Finding]:
    """DS_ACCELERATOR holds a name that DeepSpeed does not know."""
    name = machine.variables.get("DS_ACCELERATOR")
    if name is not None and name not in ACCELERATORS:
        yield book.finding(
            "accelerator-name-invalid", Severity.ERROR, affects=(needs.TORCH,), name=repr(name), known=ACCELERATORS
        )


def gpus_differ(machine: Machine) -> Iterator[Finding]:
    """GPUs of different kinds are in this machine."""
    kinds = sorted({(gpu.name, gpu.capability) for gpu in machine.visible_gpus})
    if len(kinds) > 1:
        yield book.finding(
            "gpus-differ",
            Severity.NOTE,
            count=len(kinds),
            kinds=[f"{name} ({capability})" for name, capability in kinds],
            architectures=";".join(numeric([capability for _, capability in kinds])),
        )


def _runs(built: str, capability: str) -> bool:
    """Whether machine code of one architecture runs on a GPU: same major, and not newer."""
    return order(built)[0] == order(capability)[0] and order(built) <= order(capability)


def _wanted(machine: Machine) -> tuple[str, ...]:
    """The architectures that a build would compile for."""
    text = machine.variables.get(ARCH_VARIABLE, "").strip()
    if not text:
        return numeric([gpu.capability for gpu in machine.visible_gpus])
    try:
        return tuple(plain(entry) for entry in parse_architectures(text))
    except UsageError:
        return ()


def _fitting(machine: Machine) -> tuple[str, ...]:
    taken = machine.taken
    major = taken.release.major if taken and taken.release else 0
    return tuple(entry for entry in _wanted(machine) if taken and compiled_by(entry, taken.architectures, major))


CHECKS = (
    driver_silent,
    driver_too_old,
    gpu_not_in_torch,
    gpu_arch_unsupported_by_nvcc,
    gpu_arch_unknown_to_torch,
    arch_list_empty,
    accelerator_autodetect_cpu,
    accelerator_name_invalid,
    gpus_differ,
)
