"""BuildPlan -> wheel: assembles the toolkit, compiles the ops while the rest is packed, and checks that they load.

Works in a temporary folder; the wheel appears in the out folder by rename, or not at all.
"""

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from dsdoctor.builder.make.commands import ask_commands
from dsdoctor.builder.make.compile import child_environment, compile_ops
from dsdoctor.builder.make.manifest import EARLIEST, Manifest, describe_wheel, encode_inside, write_into
from dsdoctor.builder.make.op_cache import OpCache
from dsdoctor.builder.make.op_job import Compiled, Watch
from dsdoctor.builder.make.pack import packing, put_in
from dsdoctor.builder.make.prove import OpProof, prove
from dsdoctor.builder.make.sbom import SBOM, bill_of_materials
from dsdoctor.builder.make.scheduler import Pool
from dsdoctor.builder.make.workdir import LIBRARY, Workdir, gather, tree_to_compile_in
from dsdoctor.builder.toolkit.assemble import assemble
from dsdoctor.builder.toolkit.kept import refuse_altered
from dsdoctor.builder.toolkit.parts import toolkit_parts
from dsdoctor.builder.toolkit.python_headers import unpack_headers
from dsdoctor.core.build_models import BuildPlan, BuildResult, OpResult, Source
from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.files import PRIVATE, make_folder, replacing
from dsdoctor.core.finding import Finding
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine

LONGEST_EPOCH = 11
TAG, TAG_LENGTH = "b", 8
"""The tag's first letter, which keeps it from being read as a number, and how many hexadecimal digits of sha256 follow."""


@dataclass(frozen=True, kw_only=True)
class _Packed:
    """A wheel in the out folder, or None where an op in it failed its check."""

    wheel: Path | None = None
    proofs: tuple[OpProof, ...] = ()
    notes: tuple[Finding, ...] = ()


def make(
    host: LocalHost,
    plan: BuildPlan,
    source: Source,
    machine: Machine,
    workdir: Workdir,
    *,
    say: Callable[[str], None],
    watch: Watch,
) -> BuildResult:
    """Carry out a plan. Where an op fails, the result has no wheel; where dsdoctor itself cannot go on, BuildFailed is raised.

    ``say`` gets a line for each step, ``watch`` the progress of each op.
    """
    started, cpu = time.monotonic(), _cpu_seconds()
    prepare_out(workdir.out)
    _prepare(host, plan, say)
    compiled, cache, bare = _compiled(host, plan, source, machine, workdir, say, watch)
    packed = _Packed()
    if all(op.library for op in compiled):
        packed = _packed(host, plan, source, machine, workdir, say, bare())
    if cache is not None:
        cache.drop(proof.op for proof in packed.proofs if proof.wrong)
    join_logs(workdir.logs)
    results = _results(plan, compiled, packed.proofs)
    return BuildResult(
        wheel=str(packed.wheel) if packed.wheel else None,
        manifest=f"{packed.wheel}.json" if packed.wheel else None,
        ops=results,
        seconds=round(time.monotonic() - started, 1),
        cpu_seconds=round(_cpu_seconds() - cpu, 1),
        log=str(workdir.logs / "build.log"),
        findings=(*_failures(results), *packed.notes),
        inputs=cache.inputs() if cache else None,
    )


def _compiled(
    host: LocalHost,
    plan: BuildPlan,
    source: Source,
    machine: Machine,
    workdir: Workdir,
    say: Callable[[str], None],
    watch: Watch,
) -> tuple[tuple[Compiled, ...], OpCache | None, Callable[[], Path]]:
    """Compile every op while the wheel is packed without them: the ops, the cache they came from, and what gives that wheel."""
    with (
        tree_to_compile_in(plan, source, machine, say) as tree,
        packing(host, plan, source, workdir, compiled_in=tree) as bare,
    ):
        pool = workdir.pool or Pool(plan.jobs, plan.memory)
        env, logs = child_environment(host, plan), workdir.logs
        cache = OpCache(plan, machine, tree, workdir.store, env) if workdir.store else None
        asking = partial(ask_commands, host, plan, tree=tree, env=env, preloaded=workdir.preloaded)
        compiled = compile_ops(
            host, plan, machine, asking, tree=tree, env=env, pool=pool, logs=logs, cache=cache, watch=watch
        )
        gather(plan, compiled, workdir.folder / LIBRARY)
    return compiled, cache, bare


def _packed(
    host: LocalHost,
    plan: BuildPlan,
    source: Source,
    machine: Machine,
    workdir: Workdir,
    say: Callable[[str], None],
    bare: Path,
) -> _Packed:
    """Put the compiled ops into the wheel, check each of them, and put the wheel into the out folder."""
    say("packing and checking the wheel")
    plan = _with_tag(host, plan, source, machine, workdir)
    packed = put_in(bare, workdir.folder / LIBRARY, plan, workdir.folder / "complete")
    env = child_environment(host, plan)
    proofs, notes = prove(packed, plan, machine, folder=workdir.folder / "proof", env=env, preloaded=workdir.preloaded)
    if any(proof.wrong for proof in proofs):
        return _Packed(proofs=proofs, notes=notes)
    manifest = describe_wheel(plan, source, machine, proofs)
    more = {SBOM: _bill_of_materials(host, manifest, machine)}
    return _Packed(
        wheel=write_into(packed, manifest, workdir.out, more, epoch=epoch_of(host)), proofs=proofs, notes=notes
    )


def _prepare(host: LocalHost, plan: BuildPlan, say: Callable[[str], None]) -> None:
    """Make what the plan needs and the machine lacks: a toolkit, Python's headers."""
    toolkit, python = plan.toolkit, plan.python
    if toolkit is not None and toolkit.assemble:
        assemble(host, toolkit, python=python, architectures=plan.architectures, compiler=plan.env["CC"], say=say)
    elif toolkit is not None:
        refuse_altered(Path(toolkit.root))
    if plan.headers is not None:
        say(f"unpacking {plan.headers.package}")
        unpack_headers(host, plan.headers)


def refused_ops(plan: BuildPlan) -> tuple[OpResult, ...]:
    """The results of a plan that is impossible: no op was built, and those left out have their own reasons."""
    waiting = tuple(
        OpResult(op=op.op, asked=op.asked, built=False, because="the plan is impossible") for op in plan.ops
    )
    return waiting + _left_out(plan)


def prepare_out(out: Path, option: str = "--out") -> None:
    """Make the folder that an option names, and check that it can be written before the long work. Raises ImpossiblePlan."""
    try:
        make_folder(out)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ImpossiblePlan(
            f"the folder {out} of {option} cannot be written: {error.strerror}", hint=f"name another: {option} DIR"
        ) from None


def _with_tag(host: LocalHost, plan: BuildPlan, source: Source, machine: Machine, workdir: Workdir) -> BuildPlan:
    """The plan with the tag of what the wheel will hold at the end of its local version.

    pip calls a wheel with the version of the installed one installed already, and an index keeps one file of a name.
    """
    if not plan.tagged:
        return plan
    bare = describe_wheel(plan, source, machine, ())
    facts = [encode_inside(bare), _bill_of_materials(host, bare, machine), str(epoch_of(host)).encode()]
    library = workdir.folder / LIBRARY
    for path in sorted(path for path in library.rglob("*") if path.is_file()):
        facts += [str(path.relative_to(library)).encode(), path.read_bytes()]
    content = sha256(b"".join(sha256(fact).digest() for fact in facts)).hexdigest()
    return replace(plan, local_version=f"{plan.local_version}.{TAG}{content[:TAG_LENGTH]}")


def _bill_of_materials(host: LocalHost, manifest: Manifest, machine: Machine) -> bytes:
    """The wheel's bill of materials, with the packages that its toolkit is made of."""
    toolkit = manifest.plan.toolkit
    parts = toolkit_parts(Path(toolkit.root)) if toolkit else ()
    return bill_of_materials(manifest, machine, parts, epoch=host.variable("SOURCE_DATE_EPOCH"))


def epoch_of(host: LocalHost) -> int:
    """The time of every file in a wheel, in seconds since 1970: SOURCE_DATE_EPOCH, else the earliest that a zip file can hold."""
    text = host.variable("SOURCE_DATE_EPOCH") or ""
    return max(EARLIEST, int(text)) if text.isascii() and text.isdigit() and len(text) < LONGEST_EPOCH else EARLIEST


def _results(plan: BuildPlan, compiled: tuple[Compiled, ...], proofs: tuple[OpProof, ...]) -> tuple[OpResult, ...]:
    wrong = {proof.op: proof.wrong for proof in proofs}
    asked = {op.op: op.asked for op in plan.ops}
    built = tuple(
        OpResult(
            op=op.op,
            asked=asked[op.op],
            built=op.library is not None and wrong.get(op.op) is None,
            cached=op.cached,
            seconds=round(op.seconds, 1),
            cpu_seconds=round(op.cpu_seconds, 1),
            peak_memory=op.peak_memory,
            because=op.because or wrong.get(op.op),
            log=str(op.log),
        )
        for op in compiled
    )
    return built + _left_out(plan)


def _left_out(plan: BuildPlan) -> tuple[OpResult, ...]:
    return tuple(OpResult(op=left.op, asked=left.asked, built=False, because=left.because) for left in plan.left_out)


def _failures(results: tuple[OpResult, ...]) -> tuple[Finding, ...]:
    return tuple(
        Finding.error(
            "op-failed",
            f"{result.op} was not built: {result.because}",
            evidence=[f"log: {result.log}"],
            affects=[result.op],
        )
        for result in results
        if result.log and not result.built
    )


def join_logs(logs: Path) -> None:
    """Join all logs into one build.log, like the guide's ``tee build.log``."""
    with replacing(logs / "build.log", mode=PRIVATE) as whole:
        for part in sorted(logs.glob("*.log")):
            if part.name != "build.log":
                whole.write(b"===== %b =====\n%b\n" % (part.stem.encode(), part.read_bytes()))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
