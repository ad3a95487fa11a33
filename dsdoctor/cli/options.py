"""The options that commands share, each with its help."""

import os
from pathlib import Path
from typing import Annotated

import typer

from dsdoctor.core.build_models import BuildOrder, BuildRequest
from dsdoctor.core.errors import UsageError

Ops = Annotated[
    str | None,
    typer.Option(help='Ops, such as "cpu_adam,fused_adam"; "all" for every one that can be built. Default: cpu_adam, '
                      "utils, and fused_adam on CUDA."),
]  # fmt: skip
For = Annotated[Path | None, typer.Option("--for", metavar="DS_CONFIG", help="Derive the ops from a ds_config.json.")]
Arch = Annotated[
    str | None,
    typer.Option(help='GPU architectures, such as "8.0;9.0+PTX". Default: the visible GPUs, else all that torch has.'),
]
SourceOption = Annotated[
    str | None,
    typer.Option("--source", metavar="DIR|SDIST|VERSION|newest|git+URL",
                 help="DeepSpeed to build. Default: the installed version, else the newest release."),
]  # fmt: skip
PythonOption = Annotated[
    str, typer.Option("--python", metavar="PATH", help="Interpreter of the environment to build for.")
]
Pythons = Annotated[
    list[str] | None,
    typer.Option("--python", metavar="PATH|VERSION",
                 help="Interpreter of the environment to build for, or a version such as 3.12 that is looked for here; repeat it. "
                      "Default: the one that runs dsdoctor."),
]  # fmt: skip
Torches = Annotated[
    list[str] | None,
    typer.Option("--torch", metavar="VERSION",
                 help="Build for this torch in an environment of its own; repeat it. Every --python goes with every --torch."),
]  # fmt: skip
Cudas = Annotated[
    list[str] | None,
    typer.Option("--cuda", metavar="RELEASE|cpu",
                 help="The CUDA release of each --torch, such as 12.8, from torch's own index; repeat it. Default: what pip's "
                      "index gives."),
]  # fmt: skip
TorchIndex = Annotated[
    str | None, typer.Option("--torch-index", metavar="URL", help="Package index that has the builds of --torch.")
]
Toolkit = Annotated[
    str,
    typer.Option(metavar="auto|pypi|DIR",
                 help="auto chooses or assembles one, pypi assembles one from PyPI's parts, DIR takes that one."),
]  # fmt: skip
Accelerator = Annotated[str | None, typer.Option(metavar="cuda|cpu", help="Default: cuda for a CUDA build of torch.")]
Cpu = Annotated[
    str | None,
    typer.Option("--cpu", metavar="native|LEVEL",
                 help="Processor that host code is for: x86-64, x86-64-v2, x86-64-v3 (AVX2), x86-64-v4 (AVX512); armv8-a, "
                      "armv8.2-a, armv8.2-a+sve, armv9-a. Default: what all of --node have, else this machine's own."),
]  # fmt: skip
Nodes = Annotated[
    list[Path] | None,
    typer.Option("--node", metavar="FILE",
                 help="Snapshot (dsdoctor record) of a machine that the wheel is for; repeat it. Host code and GPU "
                      "architectures become those that serve all of them."),
]  # fmt: skip
DebugInfo = Annotated[bool, typer.Option("--debug-info", help="Keep debug information: larger, and slower to compile.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Compile jobs at once. Default: what processors and memory allow.")
]
LocalVersion = Annotated[
    str | None, typer.Option(metavar="TEXT", help='Local version segment. Default: such as "cu13.0.torch2.14".')
]
NoLocalVersion = Annotated[bool, typer.Option("--no-local-version", help="Keep DeepSpeed's plain version.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Compile every op anew, and keep none of them.")]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing; say what would be needed.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]
MachineFile = Annotated[
    Path | None,
    typer.Option(
        "--machine", metavar="FILE", help="Judge the machine in this snapshot (dsdoctor record) instead of this one."
    ),
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show everything, also what is well.")]
Index = Annotated[
    Path | None,
    typer.Option("--index", metavar="DIR", help="Also list the wheel in this package index (PEP 503, static files)."),
]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder that gets the wheel.")]


def order_of(
    python: str,
    source: str | None,
    ops: str | None,
    config: Path | None,
    arch: str | None,
    accelerator: str | None,
    toolkit: str,
    jobs: int | None,
    local_version: tuple[str | None, bool],
    offline: bool,
    *,
    machine: Path | None = None,
    host_code: tuple[str | None, list[Path] | None, bool] = (None, None, False),
    cache: bool = True,
) -> BuildOrder:
    """What the options come to. Raises UsageError for those that contradict each other or say nothing."""
    named, none = local_version
    cpu, nodes, debug_info = host_code
    if ops is not None and config is not None:
        raise UsageError("--ops and --for cannot be given together", hint="name one")
    if named and none:
        raise UsageError("--local-version and --no-local-version cannot be given together", hint="name one")
    if accelerator not in {None, "cuda", "cpu"}:
        raise UsageError(f"--accelerator {accelerator!r} is none", hint="it takes cuda or cpu")
    names = tuple(name.strip() for name in ops.split(",") if name.strip()) if ops is not None else None
    if names == ():
        raise UsageError("--ops is empty", hint='name ops with "," between them, or "all", or "default"')
    request = BuildRequest(
        ops=None if names == ("default",) else names,
        arch=arch,
        accelerator=accelerator,
        toolkit=toolkit if toolkit in {"auto", "pypi"} else os.path.abspath(os.path.expanduser(toolkit)),  # noqa: PTH100, PTH111
        jobs=jobs,
        local_version="" if none else named,
        offline=offline,
        cpu=cpu,
        debug_info=debug_info,
    )
    told = tuple(nodes or ())
    return BuildOrder(
        python=python, machine=machine, source=source, config=config, nodes=told, request=request, cache=cache
    )
