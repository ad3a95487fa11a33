"""The proof of a packed wheel: it holds each op, for the planned GPUs, and each op loads with this torch."""

import zipfile
from collections.abc import Set
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from dsdoctor.builder.make.compile import shared_object
from dsdoctor.builder.plan.processor import lacking
from dsdoctor.builder.wheel.shared_object import (
    ElfInfo,
    lacks_driver,
    lacks_instructions,
    load_each,
    not_tried,
    read_elf,
)
from dsdoctor.core.architectures import plain
from dsdoctor.core.build_models import BuildPlan, OpPlan
from dsdoctor.core.children import PreloadedPython
from dsdoctor.core.deepspeed_install import parse_version_info
from dsdoctor.core.finding import Finding
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine


@dataclass(frozen=True, kw_only=True)
class OpProof:
    """What was found for one op. ``loads`` is None when that cannot be tried here; ``wrong`` is why it cannot be used."""

    op: str
    file: str | None = None
    sha256: str | None = None
    elf_info: ElfInfo | None = None
    loads: bool | None = None
    wrong: str | None = None


def prove(
    wheel: Path,
    plan: BuildPlan,
    machine: Machine,
    *,
    folder: Path,
    env: dict[str, str],
    preloaded: PreloadedPython | None = None,
) -> tuple[tuple[OpProof, ...], tuple[Finding, ...]]:
    """Unpack the wheel's shared objects into ``folder``, read each and load it; the wheel itself is not changed."""
    claimed = _claims(wheel)
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder, [name for name in file.namelist() if name.endswith(".so")])
    libraries = {op.op: shared_object(folder, op.module) for op in plan.ops}
    present = {op: path for op, path in libraries.items() if path}
    errors = load_each(LocalHost(env=env), plan.python, present, preloaded=preloaded)
    missing = lacking(plan.processor, machine.system)
    without_driver = tuple(op for op, error in errors.items() if lacks_driver(error, machine))
    above = tuple(op for op, error in errors.items() if lacks_instructions(error, missing))
    untried = {*without_driver, *above}
    proofs = tuple(_proof(op, libraries[op.op], claimed, errors, folder, untried) for op in plan.ops)
    return proofs, (*not_tried(without_driver), *not_tried(above, missing))


def planned_gpu_code(op: OpPlan) -> set[str]:
    """The GPU code that an op's shared object must hold, written as in the wheel-variant property ``sm_arch``."""
    real = {f"{plain(entry).replace('.', '')}_real" for entry in op.architectures}
    return real | {f"{plain(e).replace('.', '')}_virtual" for e in op.architectures if e.endswith("+PTX")}


def _claims(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        text = file.read("deepspeed/git_version_info_installed.py").decode("utf-8", errors="replace")
    ops = parse_version_info(text).get("installed_ops")
    return {name for name, on in ops.items() if on} if isinstance(ops, dict) else set()


def _proof(
    op: OpPlan,
    path: Path | None,
    claimed: set[str],
    errors: dict[str, str | None],
    folder: Path,
    untried: Set[str],
) -> OpProof:
    if path is None:
        return OpProof(op=op.op, wrong="it was built, and the wheel does not hold it")
    elf_info = read_elf(path)
    error = errors[op.op]
    wrong = None
    if op.op not in claimed:
        wrong = "the wheel holds it, and its git_version_info_installed.py does not say so"
    elif error is not None and op.op not in untried:
        wrong = f"it does not load with this torch: {error}"
    elif op.device_code and set(elf_info.sm_arch or ()) != planned_gpu_code(op):
        inside = ", ".join(elf_info.sm_arch or ()) or "nothing"
        wrong = f"it holds GPU code for {inside}, planned was {', '.join(sorted(planned_gpu_code(op)))}"
    return OpProof(
        op=op.op,
        file=path.relative_to(folder).as_posix(),
        sha256=sha256(path.read_bytes()).hexdigest(),
        elf_info=elf_info,
        loads=None if op.op in untried else error is None,
        wrong=wrong,
    )
