"""The DeepSpeed whose ops are judged or built: named, installed, recorded, else the newest -> its ops as data."""

import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from dsdoctor.builder.source.describe_ops import describe, describe_installed
from dsdoctor.builder.source.fetch import LaidOut, lay_out
from dsdoctor.builder.source.sdists import NEWEST
from dsdoctor.core.architectures import KNOWN, numeric
from dsdoctor.core.build_models import Source
from dsdoctor.core.errors import DoctorError, UsageError
from dsdoctor.core.files import write_text
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.snapshot import Snapshot
from dsdoctor.core.workspace import cache_folder, private_folder, workspace
from dsdoctor.probe.observe import Observation, Say


def source_at_hand(
    observation: Observation, spec: str | None, request: BuildRequest, *, say: Say, folder: Path | None = None
) -> Source:
    """The DeepSpeed whose ops are judged: named, else installed (or recorded), else the newest.

    ``folder`` gets its tree where there is one; without it the tree is thrown away and only the facts stay.
    """
    installed, torch = observation.machine.deepspeed, observation.machine.torch
    if torch is not None and torch.hip is not None and request.accelerator != "cpu":
        raise DoctorError(
            f"torch {torch.version} is a ROCm build, and dsdoctor judges the ops for CUDA and CPU",
            hint="--accelerator cpu judges the host ops",
        )
    accelerator = accelerator_at_hand(observation.machine, request)
    if not spec and observation.snapshot is not None:
        return recorded_source(observation.snapshot, accelerator)
    if observation.machine.python is None:
        raise DoctorError(
            "no Python answers, so nothing can be asked of a DeepSpeed", hint="name one with --python PATH"
        )
    if not spec and installed:
        return describe_installed(
            LocalHost(),
            installed,
            accelerator=accelerator,
            python=observation.machine.python.executable,
            torch=observation.machine.torch.location if observation.machine.torch else "",
            architectures=every_architecture(observation.machine),
        )
    if folder is not None:
        return _from_tree(observation, spec, request, accelerator, folder, say)
    with workspace(private_folder(cache_folder(LocalHost()))) as place:
        return _from_tree(observation, spec, request, accelerator, place, say)


def accelerator_at_hand(machine: Machine, request: BuildRequest) -> str:
    """Whose ops are judged: asked for, set in the shell, else those of this torch (without one: of these GPUs)."""
    shell = machine.variables.get("DS_ACCELERATOR")
    named = request.accelerator or (shell if shell in {"cuda", "cpu"} else None)
    cuda = machine.torch.cuda is not None if machine.torch else bool(machine.gpus)
    return named or ("cuda" if cuda else "cpu")


def recorded_source(snapshot: Snapshot, accelerator: str) -> Source:
    """The ops that a snapshot holds. Raises UsageError where it holds none, or another accelerator's."""
    if snapshot.source is None:
        raise UsageError("the snapshot holds no ops of a DeepSpeed", hint="name one: --source 0.19.8")
    try:
        source = msgspec.convert(snapshot.source, Source)
    except msgspec.ValidationError as error:
        raise UsageError(f"the snapshot's ops are malformed: {error}", hint="record it again") from None
    if source.accelerator != accelerator:
        raise UsageError(
            f"the snapshot holds the ops for {source.accelerator}, asked are those for {accelerator}",
            hint="name a DeepSpeed: --source 0.19.8",
        )
    return source


def described(observation: Observation, laid: LaidOut, accelerator: str, place: Path) -> Source:
    """The ops of a tree. For a machine that is not here this dsdoctor's own Python tells them, as for that machine's torch.

    ``place`` is a folder to write to.
    """
    machine = observation.machine
    torch, python = machine.torch, machine.python.executable if machine.python else sys.executable
    folder = torch.location if torch else ""
    if not observation.is_here:
        python, folder = sys.executable, str(place / "torch-of-the-snapshot")
        Path(folder).mkdir()
        cuda = str(torch.cuda) if torch and torch.cuda else None
        version = f"__version__ = {(torch.version if torch else '0.0.0')!r}\ncuda = {cuda!r}\nhip = None\n"
        write_text(Path(folder, "version.py"), version)
    return describe(
        LocalHost(),
        laid,
        accelerator=accelerator,
        python=python,
        torch=folder,
        architectures=every_architecture(machine),
    )


def every_architecture(machine: Machine) -> tuple[str, ...]:
    """The architectures to put to the ops' own filters: all that NVIDIA has named, and all that this torch knows."""
    return numeric(tuple(dict.fromkeys((*KNOWN, *(machine.torch.known_architectures if machine.torch else ())))))


def _from_tree(
    observation: Observation, spec: str | None, request: BuildRequest, accelerator: str, place: Path, say: Say
) -> Source:
    host, cache = LocalHost(), cache_folder(LocalHost())
    python = (
        observation.machine.python.executable if observation.is_here and observation.machine.python else sys.executable
    )
    tree, wanted = place / "source", spec or NEWEST
    try:
        laid = lay_out(host, wanted, tree, cache=cache, python=python, offline=request.offline or not spec)
    except UsageError:
        if spec or request.offline:
            raise
        say("fetching the newest DeepSpeed's source, to know its ops")
        laid = lay_out(host, wanted, tree, cache=cache, python=python, offline=False)
    because = laid.limit or ("--source" if spec else "the newest; none is installed here")
    return described(observation, replace(laid, because=because), accelerator, place)
