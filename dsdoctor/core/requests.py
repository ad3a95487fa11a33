"""What the user asks of build-wheel, install and check. Data only: a field with its help is an option of these commands.

An option that several commands share is said once here, as an alias (``Arch``), also where a command takes it alone.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from dsdoctor.core.architectures import parse_architectures
from dsdoctor.core.errors import UsageError
from dsdoctor.core.machine import Node
from dsdoctor.core.options import HOW, TARGET, WHAT, flag, option, options


def split_names(_: Any, tokens: Sequence[Token]) -> tuple[str, ...] | None:
    """Names with commas between them -> a tuple; None for "default"."""
    names = tuple(name.strip() for name in tokens[-1].value.split(",") if name.strip())
    if not names:
        raise UsageError(
            f"{tokens[-1].keyword or 'the list'} is empty",
            hint='name ops with "," between them, or "all", or "default"',
        )
    return None if names == ("default",) else names


def check_interpreter(path: str) -> str:
    """The path or the name of a program, if it can be started. Raises UsageError with what is wrong with it."""
    # the one that runs this can be started, even where its folder may not be read
    if path == sys.executable or shutil.which(path) is not None:
        return path
    if os.path.isdir(path):  # noqa: PTH112 - pathlib raises where this user may not look
        inside = Path(path, "bin", "python")
        hint = f"name its interpreter: --python {inside}" if inside.exists() else "name the interpreter in it"
        raise UsageError(f"--python {path} is a folder", hint=hint)
    why = "is not executable" if "/" in path and os.path.lexists(path) else "does not exist"
    raise UsageError(f"--python {path} {why}", hint="name an interpreter, such as --python .venv/bin/python")


def _interpreter(_: Any, tokens: Sequence[Token]) -> str:
    return check_interpreter(tokens[-1].value)


def _folder(_: Any, tokens: Sequence[Token]) -> str:
    """A toolkit's folder as an absolute path; the words that are no folder as they are."""
    given = tokens[-1].value
    return given if given in {"auto", "pypi"} else os.path.abspath(os.path.expanduser(given))  # noqa: PTH100, PTH111


Ops = Annotated[
    tuple[str, ...] | None,
    option(
        name="--ops", converter=split_names, n_tokens=1, accepts_keys=False, metavar="OP,OP", group=WHAT,
        help='Ops, such as "cpu_adam,fused_adam"; "all" for every one that can be built. Default: cpu_adam, utils, and '
             "fused_adam on CUDA.",
    ),
]  # fmt: skip
For = Annotated[
    Path | None, option(name="--for", metavar="DS_CONFIG", group=WHAT, help="Derive the ops from a ds_config.json.")
]
SourceSpec = Annotated[
    str | None,
    option(
        name="--source", metavar="SOURCE", group=WHAT,
        help="DeepSpeed to build: a folder, a source distribution, a version, newest, or git+URL. Default: the installed "
             "version, else the newest release.",
    ),
]  # fmt: skip
Arch = Annotated[
    str | None,
    option(
        name="--arch", metavar="LIST", group=TARGET,
        help='GPU architectures, such as "8.0;9.0+PTX". Default: the visible GPUs, else all that torch was built for.',
    ),
]  # fmt: skip
Accelerator = Annotated[
    Literal["cuda", "cpu"] | None,
    option(name="--accelerator", metavar="cuda|cpu", group=TARGET, help="Default: cuda for a CUDA build of torch."),
]
Cpu = Annotated[
    str | None,
    option(
        name="--cpu", metavar="native|LEVEL", group=TARGET,
        help="Processor that host code is for: x86-64, x86-64-v2, x86-64-v3 (AVX2), x86-64-v4 (AVX512); armv8-a, armv8.2-a, "
             "armv8.2-a+sve, armv9-a. Default: the highest level that all of --node support, else this machine's own.",
    ),
]  # fmt: skip
NodeFiles = Annotated[
    tuple[Path, ...],
    options(
        name="--node", metavar="FILE", group=TARGET,
        help="Snapshot (dsdoctor machine record) of a machine that the wheel is for. Repeatable. Host code and GPU architectures "
             "are chosen to suit all of them.",
    ),
]  # fmt: skip
PythonPath = Annotated[
    str,
    option(
        name="--python",
        converter=_interpreter,
        metavar="PATH",
        group=TARGET,
        help="Python of the target environment. Default: this one.",
    ),
]
ToolkitChoice = Annotated[
    str,
    option(
        name="--toolkit", converter=_folder, n_tokens=1, metavar="auto|pypi|DIR", group=HOW,
        help="auto (default) chooses or assembles one, pypi assembles one from downloaded parts, DIR is used as given.",
    ),
]  # fmt: skip
Jobs = Annotated[
    int | None,
    option(
        name="--jobs", validator=Number(gte=1), group=HOW,
        help="Parallel compile jobs. Default: as many as processors and memory allow.",
    ),
]  # fmt: skip
Offline = Annotated[bool, flag(name="--offline", group=HOW, help="Download nothing; report what would be needed.")]
MachineFile = Annotated[
    Path | None,
    option(
        name="--machine", metavar="FILE", group=TARGET,
        help="The machine in this snapshot (dsdoctor machine record) instead of this one.",
    ),
]  # fmt: skip


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """What is to be built. Everything that decides is here; the plan gives a reason for every choice that is left open.

    ``ops`` is None for the default set, ("all",) for all, else names. ``arch`` is a TORCH_CUDA_ARCH_LIST or None for
    the visible GPUs. ``toolkit`` is "auto", "pypi" (assemble from fetched parts whatever lies here) or a folder.
    ``local_version`` is None for one that names torch and CUDA. ``cpu`` is a level of x86-64 or Arm, None for what all
    ``nodes`` have, without nodes for this processor. ``nodes`` are the machines that the wheel is for.
    """

    ops: Ops = None
    ops_because: Annotated[str, option(parse=False)] = ""
    arch: Arch = None
    accelerator: Accelerator = None
    toolkit: ToolkitChoice = "auto"
    jobs: Jobs = None
    local_version: Annotated[
        str | None,
        option(
            metavar="TEXT", group=WHAT, allow_leading_hyphen=True,
            help='Local version segment. Default: such as "cu13.0.torch2.14.b1f3c09a7", with a tag of the content.',
        ),
    ] = None  # fmt: skip
    no_local_version: Annotated[bool, flag(group=WHAT, help="Keep DeepSpeed's plain version.")] = False
    offline: Offline = False
    cpu: Cpu = None
    nodes: Annotated[tuple[Node, ...], option(parse=False)] = ()
    debug_info: Annotated[bool, flag(group=HOW, help="Keep debug information: larger, and slower to compile.")] = False

    @property
    def tagged(self) -> bool:
        """Whether the version ends with a tag of the wheel's content: where the user leaves its local part to us."""
        return self.local_version is None and not self.no_local_version

    def __post_init__(self) -> None:
        """Raise UsageError for options that contradict each other, and for architectures that nothing compiles for."""
        if self.arch is not None:
            try:
                parse_architectures(self.arch)
            except UsageError as error:
                raise UsageError(f"{error.message} (--arch)", hint=error.hint) from None
        if self.local_version and self.no_local_version:
            raise UsageError("--local-version and --no-local-version cannot be given together", hint="name one")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BuildOrder:
    """A request, where its parts are found, and how it is carried out.

    ``config`` is a ds_config.json that names the ops. ``nodes`` are snapshots of the machines that the wheel is for.
    ``machine`` is a snapshot that stands in for this machine. ``cache``: compiled ops are taken from the cache and kept there.
    """

    request: BuildRequest = field(default_factory=BuildRequest)
    config: For = None
    source: SourceSpec = None
    nodes: NodeFiles = ()
    python: Annotated[str, option(parse=False)] = sys.executable
    machine: Annotated[Path | None, option(parse=False)] = None
    cache: Annotated[bool, flag(parse=False)] = True

    def __post_init__(self) -> None:
        """Raise UsageError for options that contradict each other."""
        if self.request.ops is not None and self.config is not None and not self.request.ops_because:
            raise UsageError("--ops and --for cannot be given together", hint="name one")


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What the user wants examined: this machine, or the snapshot ``machine``. ``deep`` asks the compiler too; ``rules`` empty
    means every check."""

    python: str
    machine: Path | None = None
    source: str | None = None
    rules: frozenset[str] = frozenset()
    deep: bool = False
    request: BuildRequest = field(default_factory=BuildRequest)
