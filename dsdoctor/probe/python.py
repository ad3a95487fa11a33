"""Host + interpreter path -> what its environment holds: packages, the installed DeepSpeed, ops compiled at run time."""

import glob
from dataclasses import dataclass

from dsdoctor.core.children import parse_answer
from dsdoctor.core.deepspeed_install import (
    MANIFEST,
    RECORD,
    deepspeed_of_record,
    with_libraries,
    with_manifest,
    with_tags,
)
from dsdoctor.core.host import Host
from dsdoctor.core.machine import DeepSpeed, Gap, JitCache, Python, Torch
from dsdoctor.core.processes import FileHolder


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An interpreter, and the folders of the packages that other questions read.

    ``torch_lacks`` are packages that torch requires and that are not there.
    """

    python: Python
    torch: str | None = None
    torch_lacks: tuple[str, ...] = ()
    deepspeed: str | None = None
    cutlass: str | None = None


def ask_python(host: Host, python: str) -> Environment | Gap:
    """Ask the interpreter about itself and its packages; torch is not imported."""
    return parse_answer(host.ask(python, "ask_python.py", timeout=60), Environment, f"python {python}")


def read_jit_cache(host: Host, environment: Environment | None, torch: Torch | None) -> JitCache | None:
    """The folder that ``torch.utils.cpp_extension.load`` would use; None without torch or without any folder to name."""
    if environment is None or torch is None:
        return None
    named = host.variable("TORCH_EXTENSIONS_DIR")
    folder = named or _default(host, environment.python.tag, torch)
    if folder is None:
        return None
    locks: dict[str, float] = {}
    holders: dict[str, FileHolder] = {}
    for lock in host.glob(f"{glob.escape(folder)}/*/lock"):
        op, age, holder = lock.rsplit("/", 2)[1], host.age(lock), host.holder(lock)
        if age is not None:
            locks[op] = age
        if holder is not None:
            holders[op] = holder
    return JitCache(
        folder=folder,
        named=bool(named),
        writable=host.writable(folder),
        ops=tuple(path.rsplit("/", 2)[1] for path in host.glob(f"{glob.escape(folder)}/*/*.so")),
        locks=locks,
        holders=holders,
    )


def _default(host: Host, tag: str, torch: Torch) -> str | None:
    """The folder as torch's ``_get_build_directory`` names it: the user's cache folder, then pyXY_cuZZ."""
    home = host.variable("HOME")
    cache = host.variable("XDG_CACHE_HOME") or (f"{home}/.cache" if home else None)
    variant = f"cu{torch.cuda}".replace(".", "") if torch.cuda else "cpu"
    return f"{cache}/torch_extensions/{tag.replace('cp', 'py')}_{variant}" if cache else None


def read_deepspeed(host: Host, environment: Environment | None) -> DeepSpeed | None:
    """The DeepSpeed of an environment; None when there is none."""
    if environment is None or environment.deepspeed is None:
        return None
    location = environment.deepspeed
    version = environment.python.packages.get("deepspeed") or "unknown"
    facts = deepspeed_of_record(host.read(f"{location}/{RECORD}") or "", version=version, location=location)
    if facts.installed_ops:
        facts = with_libraries(facts, host.glob(f"{glob.escape(location)}/**/*.so"))
    information = f"{glob.escape(location.rsplit('/', 1)[0])}/deepspeed-{glob.escape(version)}.dist-info"
    manifest, wheel = (
        next((host.read(path) for path in host.glob(f"{information}/{name}")), None) for name in (MANIFEST, "WHEEL")
    )
    return with_tags(with_manifest(facts, manifest, exists=host.exists), wheel)
