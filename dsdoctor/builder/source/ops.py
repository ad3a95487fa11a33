"""The DeepSpeed whose ops are judged or built, its ops as its own op_builder describes them, and what that does not say.

Names, variables, sources, flags and libraries are asked of the source itself; OPS adds headers, libraries and known breakage. An
op that is not in OPS needs nothing beyond torch (and CUDA's base headers when it is a CUDA extension). Compiles nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dsdoctor.builder.source.fetch import NEWEST, LaidOut, digest, lay_out, without_steering
from dsdoctor.core.architectures import KNOWN, numeric
from dsdoctor.core.build_models import OpFact, Source
from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import BuildFailed, DoctorError, UsageError
from dsdoctor.core.files import write_text
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Cuda, DeepSpeed, Gap, Machine
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.snapshot import Snapshot
from dsdoctor.core.workspace import cache_folder, private_folder, workspace
from dsdoctor.probe.observe import Observation, Say
from dsdoctor.rules import book

CUDA_LIBRARIES = ("cudart", "curand", "cublas", "cufile", "cuda")
"""Libraries of a toolkit among those that an op links; "cuda" is the driver's, linked against a stub."""

BASE_HEADERS = ("cuda_runtime.h", "crt/host_config.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h", "cccl")
"""ATen/cuda/CUDAContext.h includes these whatever the op does."""

CURAND = ("curand_kernel.h",)
PROFILER = ("cuda_profiler_api.h",)
ASK_TIMEOUT_SECONDS = 180.0


@dataclass(frozen=True, kw_only=True)
class Need:
    """Something that an op needs beyond torch: a name in ``Machine.libraries``, and what it is."""

    name: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Breakage:
    """DeepSpeed versions and CUDA releases for which an op cannot be compiled, whatever is installed.

    ``reason`` is a phrase of the book, by its name.
    """

    deepspeed: str
    cuda_from: Cuda | None
    cuda_below: Cuda | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op. ``cuda_headers`` come on top of BASE_HEADERS; ``requires`` are ops that it cannot run without.

    ``empty``: why it can never be built, as the name of a phrase of the book.
    """

    name: str
    cuda_headers: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    requires: tuple[str, ...] = ()
    broken: tuple[Breakage, ...] = ()
    empty: str = ""


LIBAIO = Need(name="libaio", what="libaio's header and library")
CUTLASS = Need(name="cutlass", what="CUTLASS's headers")
DSKERNELS = Need(name="dskernels", what="the Python package deepspeed-kernels")
ONECCL = Need(name="oneccl", what="oneCCL, found through CCL_ROOT")
OPS = (
    Op(name="async_io", needs=(LIBAIO,), requires=("pin_memory",)),
    Op(name="gds", needs=(LIBAIO,), cuda_headers=("cufile.h",), requires=("pin_memory",)),
    Op(name="random_ltd", cuda_headers=(*CURAND, *PROFILER)),
    Op(name="transformer", cuda_headers=(*CURAND, *PROFILER)),
    Op(name="stochastic_transformer", cuda_headers=(*CURAND, *PROFILER)),
    Op(name="transformer_inference", cuda_headers=(*CURAND, *PROFILER)),
    Op(name="dc", cuda_headers=("nccl.h",)),
    Op(name="evoformer_attn", needs=(CUTLASS,), cuda_headers=CURAND),
    Op(name="cutlass_ops", needs=(DSKERNELS,)),
    Op(name="ragged_device_ops", needs=(DSKERNELS,)),
    Op(name="deepspeed_ccl_comm", needs=(ONECCL,)),
    Op(name="deepspeed_not_implemented", empty="op-placeholder"),
    Op(
        name="fp_quantizer",
        cuda_headers=CURAND,
        broken=(
            Breakage(
                deepspeed="<=0.19.8",
                cuda_from=Cuda(13, 0),
                cuda_below=None,
                reason="op-redeclares-parameter",
            ),
        ),
    ),
    Op(
        name="sparse_attn",
        broken=(
            Breakage(
                deepspeed=">=0.1",
                cuda_from=None,
                cuda_below=None,
                reason="op-needs-old-triton",
            ),
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class _Ops:
    accelerator: str
    ops: tuple[OpFact, ...]


def need_of(name: str) -> Op:
    """The catalogue's record of an op; an empty one for an op it does not know."""
    return next((op for op in OPS if op.name == name), Op(name=name))


def known_breakage(op: Op, deepspeed: str, cuda: Cuda | None) -> str | None:
    """The reason why an op cannot be compiled for this DeepSpeed and CUDA release, or None.

    >>> known_breakage(need_of("fp_quantizer"), "0.19.8", Cuda(12, 9)) is None
    True
    """
    try:
        version = Version(deepspeed.split("+")[0])
    except ValueError:
        return None
    for broken in op.broken:
        above = broken.cuda_from is None or (cuda is not None and cuda >= broken.cuda_from)
        below = broken.cuda_below is None or (cuda is not None and cuda < broken.cuda_below)
        if above and below and SpecifierSet(broken.deepspeed).contains(version, prereleases=True):
            return book.phrase("builder", broken.reason)
    return None


def describe(
    host: LocalHost, laid: LaidOut, *, accelerator: str, python: str, torch: str, architectures: Sequence[str]
) -> Source:
    """Ask the tree's own op_builder for its ops. Raises BuildFailed when it cannot answer.

    ``torch`` is the folder of the environment's torch, "" for none; ``architectures`` are put to the ops' own filters.
    """
    content = digest(laid.folder)
    version = (laid.folder / "version.txt").read_text(encoding="utf-8").strip()
    question = ("source", str(laid.folder))
    answer = _ask_ops(host, question, version, accelerator, python=python, torch=torch, architectures=architectures)
    return Source(
        folder=str(laid.folder),
        asked=laid.asked,
        because=laid.because,
        version=version,
        digest=content,
        commit=laid.commit,
        accelerator=answer.accelerator,
        ops=answer.ops,
    )


def describe_installed(
    host: LocalHost, installed: DeepSpeed, *, accelerator: str, python: str, torch: str, architectures: Sequence[str]
) -> Source:
    """The ops of an installed DeepSpeed, as ``describe``; it has no tree to build from."""
    question, version = ("installed", installed.location), installed.version
    answer = _ask_ops(host, question, version, accelerator, python=python, torch=torch, architectures=architectures)
    return Source(
        folder="",
        asked=installed.location,
        because=book.phrase("builder", "installed-here"),
        version=version,
        digest="",
        accelerator=answer.accelerator,
        ops=answer.ops,
    )


def source_at_hand(
    observation: Observation, spec: str | None, request: BuildRequest, *, say: Say, folder: Path | None = None
) -> Source:
    """The DeepSpeed whose ops are judged: named, else installed (or recorded), else the newest.

    ``folder`` gets its tree where there is one; without it the tree is thrown away and only the facts stay.
    """
    installed = observation.machine.deepspeed
    if observation.machine.unjudged_accelerator and request.accelerator != "cpu":
        raise DoctorError(
            f"{observation.machine.unjudged_accelerator}; dsdoctor judges ops for CUDA and CPU only",
            hint="--accelerator cpu judges the host ops",
        )
    accelerator = accelerator_at_hand(observation.machine, request)
    if not spec and observation.snapshot is not None:
        return recorded_source(observation.snapshot, accelerator)
    if observation.machine.python is None:
        raise DoctorError("no Python answers, so DeepSpeed's ops cannot be listed", hint="name one with --python PATH")
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
        raise UsageError("the snapshot has no DeepSpeed ops", hint="name one: --source 0.19.8")
    try:
        source = msgspec.convert(snapshot.source, Source)
    except msgspec.ValidationError as error:
        raise UsageError(f"the snapshot's ops are malformed: {error}", hint="record it again") from None
    if source.accelerator != accelerator:
        raise UsageError(
            f"the snapshot has the ops for {source.accelerator}, not for {accelerator}",
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


def _ask_ops(
    host: LocalHost,
    question: tuple[str, str],
    version: str,
    accelerator: str,
    *,
    python: str,
    torch: str,
    architectures: Sequence[str],
) -> _Ops:
    # some builders join CUDA_HOME to a path in a flag; nothing is looked up there
    variables = {"DS_ACCELERATOR": accelerator, "CUDA_HOME": "/dsdoctor-asks-for-flags-only"}
    child = LocalHost(env=without_steering(host.environment()) | variables)
    answer: _Ops | Gap = Gap(question="op_builder", reason="not asked")
    for how in (torch, *(["import"] if torch else [])):
        answer = parse_answer(
            child.ask(python, "ask_ops.py", *question, how, *architectures, timeout=ASK_TIMEOUT_SECONDS),
            _Ops,
            "op_builder",
        )
        if not isinstance(answer, Gap):
            return answer
    assert isinstance(answer, Gap)
    raise BuildFailed(
        f"DeepSpeed {version}'s op_builder does not start with this torch: {answer.reason}",
        hint="choose a DeepSpeed that fits this torch with --source VERSION",
    )


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
        say("downloading the newest DeepSpeed's source to list its ops")
        laid = lay_out(host, wanted, tree, cache=cache, python=python, offline=False)
    because = laid.limit or ("--source" if spec else book.phrase("builder", "newest-since-none-installed"))
    return described(observation, replace(laid, because=because), accelerator, place)
