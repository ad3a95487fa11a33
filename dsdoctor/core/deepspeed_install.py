"""What a built DeepSpeed writes down of itself -> DeepSpeed facts. Files as text go in; nothing of them is executed.

Three writers: DeepSpeed's setup.py (``git_version_info_installed.py``), the wheel's maker (``WHEEL``) and dsdoctor
(``dsdoctor.json``, the manifest).
"""

import ast
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from dsdoctor.core.machine import WATCHED, DeepSpeed
from dsdoctor.core.text import decode

RECORD = "git_version_info_installed.py"
MAX_RECORD_LENGTH = 1 << 16
"""Characters of it that are read: DeepSpeed, with all of its ops, writes two thousand."""

MANIFEST = "dsdoctor.json"


@dataclass(frozen=True, kw_only=True)
class _Op:
    op: str
    sm_arch: tuple[str, ...] | None = None
    needed: tuple[str, ...] = ()
    run_path: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Nvidia:
    cuda_version_lower_bound: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """The part of the manifest that says for which machines a wheel is."""

    schema: str
    version: str
    accelerator: str
    torch: str
    nvidia: _Nvidia | None = None
    glibc: str | None = None
    glibcxx: str | None = None
    cpu_architecture: str | None = None
    cpu_flags: tuple[str, ...] = ()
    ops: tuple[_Op, ...] = field(default_factory=tuple)


def deepspeed_of_record(text: str, *, version: str, location: str) -> DeepSpeed:
    """The facts of a ``git_version_info_installed.py``; ``version`` is used where it names none."""
    facts = parse_version_info(text)
    torch = facts.get("torch_info")
    built_with = torch if isinstance(torch, dict) else {}
    ops = facts.get("installed_ops")
    return DeepSpeed(
        version=str(facts.get("version") or version),
        location=location,
        accelerator=str(facts["accelerator_name"]) if facts.get("accelerator_name") else None,
        torch=_release(built_with.get("version")),
        cuda=_release(built_with.get("cuda_version")),
        installed_ops=_op_names(ops),
    )


def _op_names(ops: object) -> tuple[str, ...]:
    """The ops that are on; a name that no op can have is left out."""
    names = [str(name) for name, on in ops.items() if on] if isinstance(ops, dict) else []
    return tuple(sorted(name for name in names if re.fullmatch(r"\w{1,80}", name, re.ASCII)))


def with_manifest(facts: DeepSpeed, manifest: str | None, *, exists: Callable[[str], bool]) -> DeepSpeed:
    """Add what a manifest says; one that is malformed adds a doubt, and none adds nothing. ``exists`` is asked about paths."""
    from msgspec import DecodeError

    if manifest is None:
        return facts
    unreadable = replace(facts, doubts=(*facts.doubts, f"its manifest {MANIFEST} cannot be read"))
    try:
        told = decode(manifest, _Manifest)
    except DecodeError:
        return unreadable
    if not told.schema.startswith("dsdoctor-manifest/"):
        return unreadable
    return replace(
        facts,
        accelerator=told.accelerator,
        torch=_release(told.torch) or facts.torch,
        cuda=told.nvidia.cuda_version_lower_bound if told.nvidia else facts.cuda,
        sm_arch={op.op: op.sm_arch for op in told.ops if op.sm_arch},
        cpu_architecture=told.cpu_architecture,
        cpu_flags=told.cpu_flags,
        glibc=told.glibc,
        glibcxx=told.glibcxx,
        needed={op.op: left for op in told.ops if (left := left_to_system(op.needed, op.run_path, exists))},
        told_by="manifest",
    )


def left_to_system(needed: Iterable[str], run_path: Collection[str], exists: Callable[[str], bool]) -> tuple[str, ...]:
    """Those of WATCHED that a shared object links and that none of its own folders holds; none are told where such a folder is
    named after the object's own place ($ORIGIN): it may bring them along.

    >>> left_to_system(["libaio.so.1", "libgomp.so.1", "libc.so.6"], ["/env/lib"], {"/env/lib/libgomp.so.1"}.__contains__)
    ('libaio.so.1',)
    >>> left_to_system(["libaio.so.1"], ["$ORIGIN/../deepspeed.libs"], lambda path: False)
    ()
    """
    folders = [folder for folder in run_path if folder.startswith("/")]
    if any("$ORIGIN" in folder or "${ORIGIN}" in folder for folder in run_path):
        return ()
    watched = [name for name in WATCHED if name in set(needed)]
    return tuple(name for name in watched if not any(exists(f"{folder}/{name}") for folder in folders))


def with_tags(facts: DeepSpeed, wheel: str | None) -> DeepSpeed:
    """Add the Python and platform tags of a ``WHEEL`` file.

    >>> with_tags(DeepSpeed(version="1", location="."), "Tag: cp311-cp311-linux_x86_64").platform
    ('linux_x86_64',)
    """
    tags = re.findall(r"^Tag: ([^-\s]+)-([^-\s]+)-([^-\s]+)\s*$", wheel or "", re.MULTILINE)
    pythons, platforms = {tag[0] for tag in tags}, {tag[2] for tag in tags}
    return replace(facts, python=tuple(sorted(pythons)), platform=tuple(sorted(platforms)))


def with_libraries(facts: DeepSpeed, paths: Iterable[str]) -> DeepSpeed:
    """Add which of the claimed ops have a shared object among ``paths``: an op's module is named after it.

    >>> facts = DeepSpeed(version="1", location=".", installed_ops=("cpu_adam", "utils"))
    >>> with_libraries(facts, ["deepspeed/ops/adam/cpu_adam_op.cpython-311-x86_64-linux-gnu.so"]).present_ops
    ('cpu_adam',)
    """
    paths = tuple(paths)
    here = {op: library_of(op, paths) for op in facts.installed_ops}
    found = tuple(op for op, path in here.items() if path)
    unclaimed = sorted(_stem(path) for path in paths if path not in here.values())
    return replace(facts, present_ops=found, unclaimed=tuple(unclaimed))


def library_of(op: str, paths: Iterable[str]) -> str | None:
    """The path of an op's shared object among some: its module is named after the op (op_builder's ``absolute_name``)."""
    return next((path for path in paths if _stem(path) in {op, f"{op}_op", f"kernels{op}"}), None)


def recorded_wheel_digest(manifest: str | None) -> str | None:
    """The sha256 of the whole wheel that the manifest beside it tells; None without one."""
    from msgspec import DecodeError

    try:
        told = decode(manifest or "", object)
    except DecodeError:
        return None
    digest = told.get("sha256") if isinstance(told, dict) else None
    return digest if isinstance(digest, str) else None


def _stem(path: str) -> str:
    return path.rsplit("/", 1)[-1].split(".")[0]


def parse_version_info(text: str) -> dict[str, object]:
    """The literal assignments of a ``git_version_info_installed.py``; nothing is executed.

    >>> parse_version_info("version='0.19.8'\\ninstalled_ops={'utils': 1}\\nimport os")
    {'version': '0.19.8', 'installed_ops': {'utils': 1}}
    """
    facts: dict[str, object] = {}
    for line in text[:MAX_RECORD_LENGTH].splitlines():
        name, equals, value = line.partition("=")
        if not equals or not name.strip().isidentifier():
            continue
        try:
            facts[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return facts


def _release(value: object) -> str | None:
    """Major and minor of a release, which is what DeepSpeed's loader compares.

    >>> _release("2.14.1+cu130"), _release("0.0"), _release(None)
    ('2.14', None, None)
    """
    match = re.match(r"(\d{1,3}\.\d{1,3})", value) if isinstance(value, str) else None
    return match[1] if match and match[1] != "0.0" else None
