"""The collectives that ZeRO uses, through deepspeed.comm; and whether DeepSpeed would compile first, read from files alone.

On a CPU DeepSpeed compiles deepspeed_shm_comm at its first start (minutes). A process that is killed meanwhile leaves a lock
behind, for which every later start waits for ever. Nothing here removes a lock; see ``own_lock``.
"""

import importlib.util
import re
import sys
from collections.abc import Callable
from typing import Any

from dsdoctor.comm.collectives import calls
from dsdoctor.comm.collectives.calls import Buffer
from dsdoctor.comm.collectives.catalogue import DTYPES, ODD, Collective, ExchangeStep
from dsdoctor.comm.collectives.run import run_steps
from dsdoctor.comm.collectives.values import CollectiveCall, Reduction
from dsdoctor.comm.models import RankGroup
from dsdoctor.comm.results import Exchange
from dsdoctor.core.host import Host, LocalHost

EXTENSION = "deepspeed_shm_comm"


def run_layer(group: RankGroup, tell: Callable[[int, str], None]) -> tuple[Exchange, ...]:
    """Start DeepSpeed's layer on the group that is there, then all_reduce, all_gather and reduce_scatter through it, with values.

    Importing deepspeed prints, may compile (ask ``compiles_first``), and needs ninja on a CPU. Raises what it raises.
    """
    tell(0, "importing deepspeed")
    import deepspeed

    tell(0, "deepspeed.init_distributed")
    deepspeed.init_distributed(dist_backend=group.backend, auto_mpi_discovery=False, verbose=False)
    found = [collective for collective in LAYER if group.world >= collective.least]
    elements = max(ODD // group.world, 1) | 1
    return run_steps(
        group,
        [ExchangeStep(collective=collective, dtype=kind, elements=elements) for collective in found for kind in DTYPES],
        tell,
    )


def compiles_first(host: Host | None = None, *, deepspeed: str | None = None, torch: str | None = None) -> str | None:
    """Why starting DeepSpeed's layer would compile or hang here, None where it starts at once. Imports neither package.

    ``deepspeed`` and ``torch`` are the packages' folders; left out, those that this Python would import.
    """
    host = host or LocalHost()
    deepspeed, torch = deepspeed or package_folder("deepspeed"), torch or package_folder("torch")
    if deepspeed is None or torch is None:
        return None
    if not _wants_extension(host, deepspeed, torch):
        return None
    folder = f"{extensions_folder(host, torch)}/{EXTENSION}"
    if host.exists(f"{folder}/lock"):
        return f"{folder}/lock is there: DeepSpeed would wait until the process that compiles {EXTENSION} removes it"
    library = host.age(f"{folder}/{EXTENSION}.so")
    if library is None:
        return f"DeepSpeed would compile {EXTENSION} first, which takes minutes ({folder} has none)"
    recipe = host.read(f"{folder}/build.ninja") or ""
    if not all(package in recipe or host.resolve(package) in recipe for package in (deepspeed, torch)):
        return f"DeepSpeed would compile {EXTENSION} again ({folder} was made by another DeepSpeed or torch)"
    sources = (f"{torch}/version.py", f"{deepspeed}/ops/csrc/cpu/comm/shm.cpp")
    ages = [age for age in map(host.age, sources) if age is not None]
    if any(age < library for age in ages):
        return f"DeepSpeed would compile {EXTENSION} again ({folder} is older than torch or DeepSpeed)"
    return None


def own_lock(host: Host | None = None, *, torch: str | None = None) -> str | None:
    """The lock file of a compilation of the layer. Who ends a compilation that it started, and saw no lock before, removes it."""
    torch = torch or package_folder("torch")
    return f"{extensions_folder(host or LocalHost(), torch)}/{EXTENSION}/lock" if torch else None


def package_folder(name: str) -> str | None:
    """The folder of a package, which is not imported."""
    found = importlib.util.find_spec(name)
    places = found.submodule_search_locations if found else None
    return str(places[0]) if places else None


def extensions_folder(host: Host, torch: str) -> str:
    """Where torch compiles extensions at run time: torch.utils.cpp_extension's ``_get_build_directory``."""
    if (said := host.variable("TORCH_EXTENSIONS_DIR")) is not None:
        return said
    cache = host.variable("XDG_CACHE_HOME") or f"{host.variable('HOME') or '/root'}/.cache"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return f"{host.resolve(f'{cache}/torch_extensions')}/{python}_{parse_accelerator(host.read(f'{torch}/version.py') or '')}"


def parse_accelerator(version_file: str) -> str:
    """torch's name for the accelerator that it was built for, from its version.py.

    >>> parse_accelerator("cuda: Optional[str] = '12.8'\\nhip: Optional[str] = None\\n")
    'cu128'
    >>> parse_accelerator("cuda: Optional[str] = None\\nhip: Optional[str] = None\\n")
    'cpu'
    """
    found: dict[str, str] = dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *'([^']+)'", version_file, re.MULTILINE))
    if "hip" in found:
        return "rocm" + found["hip"].replace(".", "")
    return "cu" + found["cuda"].replace(".", "") if "cuda" in found else "cpu"


def _wants_extension(host: Host, deepspeed: str, torch: str) -> bool:
    """Whether this DeepSpeed loads the extension at its start (only on a CPU), and was not installed with it."""
    if "build_shm_op" not in (host.read(f"{deepspeed}/comm/torch.py") or ""):
        return False
    built_for_gpu = parse_accelerator(host.read(f"{torch}/version.py") or "") != "cpu"
    has_gpu = built_for_gpu and (host.glob("/dev/nvidia[0-9]*") or host.exists("/dev/kfd"))
    named = host.variable("DS_ACCELERATOR")
    if named != "cpu" and (named or has_gpu):
        return False
    installed = host.read(f"{deepspeed}/git_version_info_installed.py") or ""
    return not (re.search(rf"'{EXTENSION}': True", installed) and "accelerator_name='cpu'" in installed)


def _layer() -> Any:
    import deepspeed.comm

    return deepspeed.comm


def _all_reduce(call: CollectiveCall, mine: Buffer) -> Buffer:
    _layer().all_reduce(mine, op=calls.operator(call))
    return mine


def _all_gather(call: CollectiveCall, mine: Buffer) -> Buffer:
    result = call.blank(call.elements * call.group.world)
    _layer().allgather_fn(result, mine)
    return result


def _reduce_scatter(call: CollectiveCall, mine: Buffer) -> Buffer:
    result = call.blank(call.elements)
    _layer().reduce_scatter_fn(result, mine, op=calls.operator(call))
    return result


LAYER = (
    Collective(
        name="deepspeed all_reduce",
        run=_all_reduce,
        expect=calls.reduced,
        length=calls.chunk,
        reduction=Reduction.SUM,
        in_place=True,
    ),
    Collective(name="deepspeed all_gather", run=_all_gather, expect=calls.of_all, length=calls.chunk),
    Collective(
        name="deepspeed reduce_scatter",
        run=_reduce_scatter,
        expect=calls.my_part_reduced,
        length=calls.chunks,
        reduction=Reduction.SUM,
    ),
)
