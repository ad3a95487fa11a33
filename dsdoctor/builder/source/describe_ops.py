"""A DeepSpeed tree, or an installed DeepSpeed -> its ops as its own op_builder describes them. Compiles nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsdoctor.builder.source.fetch import LaidOut, digest
from dsdoctor.builder.source.sdists import without_steering
from dsdoctor.core.build_models import OpFact, Source
from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import DeepSpeed, Gap

ASK_LIMIT = 180.0


@dataclass(frozen=True, kw_only=True)
class _Ops:
    accelerator: str
    ops: tuple[OpFact, ...]


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
        because="it is installed here",
        version=version,
        digest="",
        accelerator=answer.accelerator,
        ops=answer.ops,
    )


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
            child.ask(python, "ask_ops.py", *question, how, *architectures, timeout=ASK_LIMIT), _Ops, "op_builder"
        )
        if not isinstance(answer, Gap):
            return answer
    assert isinstance(answer, Gap)
    raise BuildFailed(
        f"DeepSpeed {version}'s op_builder does not start with this torch: {answer.reason}",
        hint="choose a DeepSpeed that fits this torch with --source VERSION",
    )
