"""The manifest of a wheel: what it is, what went into it, for which machines it is, and the proof that it holds what was planned.

Each op must be in it, for the planned GPUs, and load with this torch. The manifest is written into the wheel and beside it, and
read from there.
"""

import base64
import csv
import io
import re
import stat
import time
import zipfile
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.builder.make.compile import shared_object
from dsdoctor.builder.plan.compiler import lacking
from dsdoctor.builder.wheel.shared_object import (
    ElfInfo,
    lacks_driver,
    lacks_instructions,
    load_each,
    newest,
    not_tried,
    read_elf,
)
from dsdoctor.core import text as json_text
from dsdoctor.core.architectures import plain
from dsdoctor.core.build_models import BuildPlan, OpPlan, Source
from dsdoctor.core.children import PreloadedPython
from dsdoctor.core.deepspeed_install import MANIFEST, parse_version_info
from dsdoctor.core.files import replacing
from dsdoctor.core.finding import Finding
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine, Torch
from dsdoctor.core.release import __version__


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
        return OpProof(op=op.op, wrong="it was built, but the wheel does not contain it")
    elf_info = read_elf(path)
    error = errors[op.op]
    wrong = None
    if op.op not in claimed:
        wrong = "the wheel contains it, but git_version_info_installed.py does not list it"
    elif error is not None and op.op not in untried:
        wrong = f"it does not load with this torch: {error}"
    elif op.device_code and set(elf_info.sm_arch or ()) != planned_gpu_code(op):
        inside = ", ".join(elf_info.sm_arch or ()) or "nothing"
        wrong = f"it contains GPU code for {inside}, planned was {', '.join(sorted(planned_gpu_code(op)))}"
    return OpProof(
        op=op.op,
        file=path.relative_to(folder).as_posix(),
        sha256=sha256(path.read_bytes()).hexdigest(),
        elf_info=elf_info,
        loads=None if op.op in untried else error is None,
        wrong=wrong,
    )


SCHEMA = "dsdoctor-manifest/1"
EARLIEST = 315532800
"""1980-01-01 in seconds since 1970: zip files know no earlier time."""


@dataclass(frozen=True, kw_only=True)
class ManifestOp:
    """One op of the wheel. ``sm_arch`` holds "90_real" for machine code and "90_virtual" for PTX; None when it was not read.

    ``needed`` are the libraries that its file links, ``run_path`` the folders in the file where they are looked for first.
    """

    op: str
    file: str
    sha256: str
    sm_arch: tuple[str, ...] | None
    loads: bool | None
    needed: tuple[str, ...] = ()
    run_path: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Nvidia:
    """Named after the properties of the nvidia wheel-variant provider (PEP 817 drafts)."""

    cuda_version_lower_bound: str
    cuda_version_upper_bound: str
    sm_arch: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a wheel. ``cpu_flags`` are its host code's; ``glibc`` and ``glibcxx`` the oldest that serve all its ops."""

    schema: str = SCHEMA
    dsdoctor: str = __version__
    name: str = "deepspeed"
    version: str
    python: str
    platform: str
    accelerator: str
    torch: str
    nvidia: Nvidia | None
    toolkit: str | None
    compiler: str
    glibc: str | None
    glibcxx: str | None
    cpu_architecture: str
    cpu_flags: tuple[str, ...]
    source: str
    source_digest: str
    source_commit: str | None
    asked: tuple[str, ...]
    ops: tuple[ManifestOp, ...]
    plan: BuildPlan
    wheel: str | None = None
    size: int | None = None
    sha256: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)


def describe_wheel(plan: BuildPlan, source: Source, machine: Machine, proofs: tuple[OpProof, ...]) -> Manifest:
    """The manifest of a wheel that is not finished: its size and digest are added by ``write_into``."""
    assert machine.torch is not None
    assert machine.python is not None
    elf_infos = [proof.elf_info for proof in proofs if proof.elf_info]
    choice = {choice.what: choice.value for choice in plan.choices}
    return Manifest(
        version=plan.source_version + (f"+{plan.local_version}" if plan.local_version else ""),
        python=machine.python.tag,
        platform=machine.python.platform,
        accelerator=plan.accelerator,
        torch=machine.torch.version,
        nvidia=_nvidia(machine.torch, elf_infos) if plan.accelerator == "cuda" else None,
        toolkit=choice.get("toolkit"),
        compiler=choice.get("compiler", ""),
        glibc=newest(elf_info.glibc for elf_info in elf_infos),
        glibcxx=newest(elf_info.glibcxx for elf_info in elf_infos),
        cpu_architecture=machine.system.architecture,
        cpu_flags=tuple(sorted({flag for elf_info in elf_infos for flag in elf_info.cpu_flags})),
        source=source.asked,
        source_digest=source.digest,
        source_commit=source.commit,
        asked=tuple(op.op for op in plan.ops if op.asked),
        ops=tuple(_op(proof) for proof in proofs),
        plan=plan,
        left_out={left.op: left.because for left in plan.left_out},
    )


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, with the user's home written as "~" in every value."""
    return _json(manifest, {str(Path.home()): "~"})


def encode_inside(manifest: Manifest) -> bytes:
    """The manifest as it is written into the wheel: only what decides the wheel's content, without folders, memory and time of the
    build, so that the same content gives the same bytes."""
    plan = manifest.plan
    about = tuple(replace(choice, because="") for choice in plan.choices if choice.what not in {"jobs", "DeepSpeed"})
    named = "://" in manifest.source or re.fullmatch(r"newest|\d+(\.\w+)*", manifest.source) is not None
    source = manifest.source if named else "{source}"
    bare = replace(
        plan,
        source=source,
        python="",
        jobs=0,
        memory=None,
        disk=0,
        prepend={},
        unset=(),
        choices=about,
        findings=(),
        headers=None,
    )
    toolkit = {plan.toolkit.root: "{toolkit}"} if plan.toolkit else {}
    return _json(replace(manifest, source=source, plan=bare), {**toolkit, str(Path.home()): "~"})


def decode(data: bytes) -> Manifest:
    """Read a manifest. Raises msgspec.DecodeError for what is not one."""
    return json_text.decode(data, Manifest)


def write_into(wheel: Path, manifest: Manifest, into: Path, more: Mapping[str, bytes], *, epoch: int) -> Path:
    """Copy a wheel to ``into`` with the manifest inside and RECORD rewritten; it appears there by rename.

    ``more`` are further files of its dist-info, by their names there; ``epoch`` is the time of every file, in seconds since 1970.
    The manifest goes beside it as ``<wheel>.json``, with the wheel's size and sha256. Returns the wheel's path.
    """
    final, beside = into / wheel.name, into / f"{wheel.name}.json"
    # both are whole before the first of them appears
    with replacing(beside) as side, replacing(final) as made:
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
            _copy_with(old, new, {MANIFEST: encode_inside(manifest), **more}, epoch)
        made.seek(0)
        data = made.read()
        complete = replace(manifest, wheel=wheel.name, size=len(data), sha256=sha256(data).hexdigest())
        side.write(encode(complete))
        side.flush()
    return final


def _nvidia(torch: Torch, elf_infos: list[ElfInfo]) -> Nvidia:
    # torch's release is both bounds: DeepSpeed's loader compares major and minor
    sm_arch = sorted({name for elf_info in elf_infos for name in elf_info.sm_arch or ()})
    release = str(torch.cuda)
    return Nvidia(cuda_version_lower_bound=release, cuda_version_upper_bound=release, sm_arch=tuple(sm_arch))


def _op(proof: OpProof) -> ManifestOp:
    return ManifestOp(
        op=proof.op,
        file=proof.file or "",
        sha256=proof.sha256 or "",
        sm_arch=proof.elf_info.sm_arch if proof.elf_info else None,
        loads=proof.loads,
        needed=proof.elf_info.needed if proof.elf_info else (),
        run_path=proof.elf_info.run_path if proof.elf_info else (),
    )


def _json(manifest: Manifest, names: Mapping[str, str]) -> bytes:
    public = _named(msgspec.to_builtins(manifest), {folder: name for folder, name in names.items() if len(folder) > 1})
    return msgspec.json.format(json_text.encode(public, order="sorted"), indent=1)


def _named(value: Any, names: Mapping[str, str]) -> Any:
    """A document with every folder of ``names`` replaced by its name, in every value."""
    if isinstance(value, str):
        for folder, name in names.items():
            value = re.sub(rf"{re.escape(folder)}(?![\w.-])", name, value)
        return value
    if isinstance(value, dict):
        return {key: _named(inner, names) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_named(inner, names) for inner in value]
    return value


def _copy_with(old: zipfile.ZipFile, new: zipfile.ZipFile, contents: Mapping[str, bytes], epoch: int) -> None:
    """Copy a wheel and put files into its dist-info, in place of those of the same names. RECORD comes last, as PEP 427 asks."""
    record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
    added = {f"{record.rpartition('/')[0]}/{name}": content for name, content in contents.items()}
    kept = {
        item.filename: item for item in old.infolist() if item.filename not in {record, *added} and not item.is_dir()
    }
    lines = []
    for path in sorted({*kept, *added}):
        content = added[path] if path in added else old.read(path)
        runs = path in kept and bool(kept[path].external_attr >> 16 & stat.S_IXUSR)
        new.writestr(_same_everywhere(path, epoch, runs=runs), content)
        urlsafe = base64.urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
        lines.append((path, f"sha256={urlsafe}", str(len(content))))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*lines, (record, "", "")])
    new.writestr(_same_everywhere(record, epoch, runs=False), text.getvalue())


def _same_everywhere(path: str, epoch: int, *, runs: bool) -> zipfile.ZipInfo:
    """A zip entry whose time and mode do not depend on the clock and the umask."""
    entry = zipfile.ZipInfo(path, date_time=time.gmtime(epoch)[:6])
    entry.external_attr = (stat.S_IFREG | (0o755 if runs else 0o644)) << 16
    entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
    return entry
