"""Hits and lines of a start -> hits that need both: launchers started together, devices of another maker, a text for a number."""

import re
from collections.abc import Iterator
from dataclasses import replace

from dsdoctor.core.finding import Step, step
from dsdoctor.diagnosis.failures import Frame
from dsdoctor.diagnosis.losses import FINITE
from dsdoctor.diagnosis.models import Facts, Hit
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.stages import STEP

LAUNCHED = re.compile(
    rb"runner\.py:\d{1,5}:main\] cmd = .{0,2000}?deepspeed\.launcher\.launch .{0,4000}?--master_port=(\d{2,5})\b"
)
ENDED = re.compile(rb"exits (?:successfully|with return code)|Traceback \(most recent")
MAKERS: tuple[tuple[re.Pattern[bytes], str, str, Step], ...] = (
    (
        re.compile(
            rb"initializing oneAPI environment|oneapi/setvars\.sh|intel_extension_for_(?:pytorch|deepspeed)|xpu-smi"
        ),
        "Intel's oneAPI",
        "intel_extension_for_pytorch (for old releases intel_extension_for_deepspeed too)",
        step("sycl-ls"),
    ),
    (
        re.compile(rb"torch_npu|npu-smi|ascend-toolkit|Ascend/\S{0,80}set_env\.sh"),
        "Ascend's CANN",
        "torch_npu",
        step("npu-smi info"),
    ),
    (re.compile(rb"habana|hl-smi|HABANA_"), "Habana's Gaudi", "habana_frameworks", step("hl-smi")),
    (re.compile(rb"torch_mlu|cnmon\b|[Cc]ambricon"), "Cambricon's MLU", "torch_mlu", step("cnmon")),
    (
        re.compile(rb"rocm-smi|/opt/rocm|HIP_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES"),
        "AMD's ROCm",
        "a torch for ROCm",
        step("rocm-smi"),
    ),
)
"""What a log has of another maker's machine: how it is called here, what makes torch see its devices, what lists them."""

INSTALLED = re.compile(
    r"(?:site|dist)-packages[/\\](?P<package>[A-Za-z]\w{1,60})[/\\]|(?P<source>\bop_builder|deepspeed)[/\\]"
)
DEEPCOMPILE = re.compile(
    rb"deepcompile=True|[/\\\\]deepspeed[/\\\\]compile[/\\\\]|Launching compile passes: |MemoryProfiling error"
)
SYMBOLIC = re.compile(rb"concrete integers|SymInt|[Ss]ymbolic (?:size|shape)|data-dependent|[Uu]nbacked")
CALLS = 12
"""Of so many of the innermost calls the packages are named."""


def several_launchers(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """The port is taken, and deepspeed itself was started several times at once with it: each launcher wants to be the first."""
    taken = next((hit for hit in hits if hit.rule.id == "master-port-in-use"), None)
    if taken is None:
        return
    started = [(number, found[1]) for number, raw in enumerate(scan.timeline.recent) if (found := LAUNCHED.search(raw))]
    if len(started) < 2 or len({port for _, port in started}) > 1:
        return
    between = list(scan.timeline.recent)[started[0][0] : started[-1][0]]
    if any(ENDED.search(raw) or STEP.search(raw[-400:]) or FINITE.search(raw[-400:]) for raw in between):
        return
    title = (
        "{count} launchers of deepspeed were started with the same port {port}, and only one of them can have it: so it "
        "goes where srun or mpirun starts the launcher once for each task"
    )
    fix = (
        "start one launcher on each node (srun --ntasks-per-node=1), which starts the ranks itself; or no launcher at all, and "
        "srun starts the ranks"
    )
    groups = {**taken.groups, "count": str(len(started)), "port": started[0][1].decode()}
    steps = (step("srun --ntasks-per-node=1 deepspeed SCRIPT.py"), step("ss -ltnp sport = :{port}"))
    yield replace(taken, groups=groups, signature=replace(taken.signature, title=title, fix=fix, steps=steps))


def devices_of_another_maker(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """The launcher counts no device, and the log has the tools of a maker whose devices torch does not see by itself."""
    hit = next((hit for hit in hits if "no GPU resources" in hit.text and hit.signature.title), None)
    if hit is None:
        return
    for pattern, maker, extension, lister in MAKERS:
        if any(pattern.search(raw[:4000]) for raw in scan.timeline.recent):
            title = (
                f"the launcher sees no device, and the log has {maker}: devices that are not NVIDIA's count only with their "
                "maker's extension of torch"
            )
            fix = (
                f"see that this environment has {extension}, and a DeepSpeed that knows this accelerator: old releases count CUDA "
                "devices only. If the GPUs are NVIDIA's all the same, make them visible (nvidia-smi, --gpus all, "
                "CUDA_VISIBLE_DEVICES)"
            )
            steps = (lister, *(one for one in hit.signature.steps if "get_accelerator" in one.line))
            yield replace(hit, signature=replace(hit.signature, title=title, fix=fix, steps=steps))
            return


def a_text_for_a_number(hits: list[Hit], _: Facts, __: Scan) -> Iterator[Hit]:
    """The two values that differ are written alike: one of them is a text in quotes."""
    for hit in hits:
        here, there = hit.groups.get("here", ""), hit.groups.get("there", "")
        if hit.rule.id == "hf-config-mismatch" and _are_equal(here, there):
            title = (
                "{key} has the same value in the DeepSpeed configuration ({here}) and in the TrainingArguments, but not the same "
                "type: one of them, most often that of the DeepSpeed configuration, is a string in quotes"
            )
            fix = 'write it without quotes in the DeepSpeed configuration: "{key}": {there}; or "auto", which takes the argument'
            yield replace(hit, signature=replace(hit.signature, title=title, fix=fix))


def _are_equal(one: str, other: str) -> bool:
    """Whether two values are the same if types are left out.

    >>> _are_equal("8", "8"), _are_equal("true", "True"), _are_equal("1e-5", "1e-05"), _are_equal("8", "16")
    (True, True, True, False)
    """
    if not one or one.lower() == other.lower():
        return bool(one)
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def packages_that_do_not_fit(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """A package calls something with arguments that it does not take: the packages in whose code that was are named."""
    for hit in (one for one in hits if one.rule.id == "argument-not-known" and not one.signature.steps):
        failure = next((one for one in scan.timeline.failures if one.line == hit.line and one.frames), None)
        caller = _package(failure.frames[-1]) if failure else ""
        if failure is None or not caller:
            continue
        packages = list(dict.fromkeys(filter(None, map(_package, reversed(failure.frames[-CALLS:])))))
        title = f"{hit.signature.title or hit.rule.title}; {caller} makes the call, at {failure.frames[-1].place}"
        others = " and ".join(packages[:3])
        fix = (
            f"the last call was made by {caller}"
            + (f", and the calls before it are of {others}" if packages[1:] else "")
            + ": "
            "compare their versions, and upgrade the older one, or take the releases that were made for each other"
        )
        shown = step("python -m pip show {caller} {other}") if packages[1:] else step("python -m pip show {caller}")
        groups = {**hit.groups, "caller": caller, "other": "".join(packages[1:2])}
        signature = replace(hit.signature, title=title, fix=fix, steps=(shown,))
        yield replace(hit, groups=groups, signature=signature)


def compiled_by_deepspeed(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """torch.compile failed, and it was DeepCompile, DeepSpeed's own back end, that compiled."""
    hit = next((hit for hit in hits if hit.rule.id == "torch-compile-failed" and "what" in hit.groups), None)
    if hit is None or not any(DEEPCOMPILE.search(raw[:4000]) for raw in scan.timeline.recent):
        return
    title = "DeepCompile, DeepSpeed's own compiler passes, could not compile this model ({what})"
    if any(SYMBOLIC.search(raw[:4000]) for raw in scan.timeline.recent):
        title += ": a size in its graph depends on the data (a symbolic shape), and the passes need numbers"
    fix = (
        "set compile.deepcompile false in the DeepSpeed configuration. To keep it, keep sizes that depend on the data out of the "
        "graph: no unpadding or packing of flash attention, batches of one length, no torch.nonzero and the like; a newer "
        "DeepSpeed may know more"
    )
    steps = (step("python -m pip install -U deepspeed"),)
    yield replace(hit, signature=replace(hit.signature, title=title, fix=fix, steps=steps))


def _package(frame: Frame) -> str:
    """The installed package that a frame is of; "" where it is none."""
    found = INSTALLED.search(frame.path)
    return (found["package"] or "deepspeed") if found else ""


LAUNCH_COMBINATIONS = (
    several_launchers,
    devices_of_another_maker,
    a_text_for_a_number,
    packages_that_do_not_fit,
    compiled_by_deepspeed,
)
