"""Host + environment -> torch's cache of ops compiled at run time: its folder, what lies in it, locks left behind."""

import glob

from dsdoctor.core.host import Host
from dsdoctor.core.machine import JitCache, Torch
from dsdoctor.probe.python import Environment


def read_jit_cache(host: Host, environment: Environment | None, torch: Torch | None) -> JitCache | None:
    """The folder that ``torch.utils.cpp_extension.load`` would use; None without torch or without any folder to name."""
    if environment is None or torch is None:
        return None
    named = host.variable("TORCH_EXTENSIONS_DIR")
    folder = named or _default(host, environment.python.tag, torch)
    if folder is None:
        return None
    locks: dict[str, float] = {}
    for lock in host.glob(f"{glob.escape(folder)}/*/lock"):
        age = host.age(lock)
        if age is not None:
            locks[lock.rsplit("/", 2)[1]] = age
    return JitCache(
        folder=folder,
        named=bool(named),
        writable=host.writable(folder),
        ops=tuple(path.rsplit("/", 2)[1] for path in host.glob(f"{glob.escape(folder)}/*/*.so")),
        locks=locks,
    )


def _default(host: Host, tag: str, torch: Torch) -> str | None:
    """As ``_get_build_directory`` puts it together: the user's cache folder, then pyXY_cuZZ."""
    home = host.variable("HOME")
    cache = host.variable("XDG_CACHE_HOME") or (f"{home}/.cache" if home else None)
    flavour = f"cu{torch.cuda}".replace(".", "") if torch.cuda else "cpu"
    return f"{cache}/torch_extensions/{tag.replace('cp', 'py')}_{flavour}" if cache else None
