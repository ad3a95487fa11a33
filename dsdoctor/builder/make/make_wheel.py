"""A wheel of a plan: the toolkit assembled, the ops compiled while the rest is packed, and all of it tried.

DeepSpeed's own setup.py packs the wheel without the ops, and records which it holds, and its version. A version ends in a tag of
the wheel's content, which is known only when every op is compiled: setup.py is given a stand-in for the tag, and the tag takes its
place afterwards. Works in a temporary folder; the wheel appears in the out folder by rename, or not at all.
"""

import resource
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from dsdoctor.builder.cache.store import CacheStore
from dsdoctor.builder.make.commands import ask_commands, first_error
from dsdoctor.builder.make.compile import Compiled, Pool, Watch, child_environment, compile_ops
from dsdoctor.builder.make.manifest import (
    EARLIEST,
    Manifest,
    OpProof,
    describe_wheel,
    encode_inside,
    prove,
    write_into,
)
from dsdoctor.builder.make.op_cache import OpCache
from dsdoctor.builder.make.sbom import SBOM, bill_of_materials
from dsdoctor.builder.toolkit.assemble import assemble
from dsdoctor.builder.toolkit.debian import unpack_headers
from dsdoctor.builder.toolkit.parts import refuse_altered, toolkit_parts
from dsdoctor.core.build_models import BuildPlan, BuildResult, OpResult, Source
from dsdoctor.core.children import PreloadedPython
from dsdoctor.core.errors import BuildFailed, ImpossiblePlan
from dsdoctor.core.files import PRIVATE, make_folder, real_path, replacing, write_bytes, write_text
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.redaction import Hidden
from dsdoctor.core.workspace import fixed_folder
from dsdoctor.rules import book

MIN_FREE_BYTES = 1 << 30
"""Bytes that a tree and its objects may take, estimated high: one object without debug information has less than a MiB."""

LIBRARY = "lib"
"""The folder, inside the build's own, where setup.py finds the compiled ops."""

STAND_IN = "tagtofollow"
MAX_EPOCH_DIGITS = 11
TAG, TAG_LENGTH = "b", 8
"""The tag's first letter, which keeps it from being read as a number, and how many hexadecimal digits of sha256 follow."""


@dataclass(frozen=True, kw_only=True)
class Workdir:
    """The folders of a build: ``folder`` is temporary, ``logs`` stay, ``out`` gets the wheel, ``store`` keeps compiled ops.

    ``preloaded`` is the interpreter that is built for, where it was started beforehand.
    """

    folder: Path
    logs: Path
    out: Path
    store: CacheStore | None = None
    pool: Pool | None = None
    preloaded: PreloadedPython | None = None


@dataclass(frozen=True, kw_only=True)
class _Packed:
    """A wheel in the out folder, or None where an op in it failed its check."""

    wheel: Path | None = None
    proofs: tuple[OpProof, ...] = ()
    notes: tuple[Finding, ...] = ()


@contextmanager
def tree_to_compile_in(plan: BuildPlan, source: Source, machine: Machine, say: Callable[[str], None]) -> Iterator[Path]:
    """The source tree to compile in: for GPU code a copy in a folder whose path is always the same."""
    # nvcc puts a digest of the path into GPU code: only the same path gives the same bytes
    tree = Path(real_path(source.folder))
    if not any(op.device_code for op in plan.ops):
        yield tree
        return
    torch, python = machine.torch, machine.python
    inputs = (source.version, torch.version if torch else "", python.tag if python else "", plan.accelerator)
    with fixed_folder(sha256(repr(inputs).encode()).hexdigest()[:16], say=say) as folder:
        copy = _copied(tree, folder / "source") if folder else None
        if copy is None:
            say("compiling in the cache folder: GPU code will contain a digest of its path")
        yield copy or tree


def gather(plan: BuildPlan, compiled: tuple[Compiled, ...], library: Path) -> None:
    """Move the shared objects to where setup.py looks for compiled ops."""
    modules = {op.op: op.module for op in plan.ops}
    for op in compiled:
        if op.library is not None:
            target = library.joinpath(*modules[op.op].split(".")[:-1]) / op.library.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(op.library, target)


@contextmanager
def packing(
    host: LocalHost, plan: BuildPlan, source: Source, workdir: Workdir, *, compiled_in: Path
) -> Iterator[Callable[[], Path]]:
    """Pack the tree beside what is done inside this block. The value waits for the wheel without ops, or raises BuildFailed.

    ``compiled_in`` is the tree that compilers use at the same time: setup.py writes into its own, and gets a copy where that
    would be the same.
    """
    tree = Path(source.folder)
    if real_path(tree) == real_path(compiled_in):
        tree = workdir.folder / "packing"
        shutil.copytree(source.folder, tree, symlinks=True)
    with ThreadPoolExecutor(max_workers=1) as worker:
        wheel = worker.submit(_pack, host, with_stand_in(plan), tree, workdir)
        try:
            yield wheel.result
        except (KeyboardInterrupt, SystemExit):
            host.stop()
            raise


def with_stand_in(plan: BuildPlan) -> BuildPlan:
    """The plan whose local version ends in the stand-in, where it is to end in a tag."""
    return replace(plan, local_version=f"{plan.local_version}.{STAND_IN}") if plan.tagged else plan


def put_in(bare: Path, library: Path, plan: BuildPlan, into: Path) -> Path:
    """The wheel with the shared objects below ``library`` and the plan's local version, in the folder ``into``.

    RECORD is not rewritten: that is done when the manifest comes in.
    """
    before, after = with_stand_in(replace(plan, local_version=untagged(plan))).local_version, plan.local_version
    made = into / bare.name.replace(before, after)
    make_folder(into)
    with replacing(made) as whole, zipfile.ZipFile(bare) as old, zipfile.ZipFile(whole, "w") as new:
        for item in old.infolist():
            if item.is_dir():
                continue
            content = old.read(item).replace(before.encode(), after.encode())
            entry = zipfile.ZipInfo(item.filename.replace(before, after), item.date_time)
            entry.external_attr = item.external_attr
            new.writestr(entry, content)
        for path in sorted(path for path in library.rglob("*") if path.is_file()):
            new.write(path, path.relative_to(library).as_posix())
    return made


def untagged(plan: BuildPlan) -> str:
    """The local version without its tag."""
    return plan.local_version.rpartition(".")[0] if plan.tagged else plan.local_version


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


def refused_ops(plan: BuildPlan) -> tuple[OpResult, ...]:
    """The results of a plan that is impossible: no op was built, and those left out have their own reasons."""
    because = book.phrase("builder", "plan-impossible")
    waiting = tuple(OpResult(op=op.op, asked=op.asked, built=False, because=because) for op in plan.ops)
    return waiting + _left_out(plan)


def prepare_out(out: Path, option: str = "--out") -> None:
    """Make the folder that an option names, and check that it can be written before the long work. Raises ImpossiblePlan."""
    try:
        make_folder(out)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ImpossiblePlan(
            f"cannot write to {out} ({option}): {error.strerror}", hint=f"name another: {option} DIR"
        ) from None


def epoch_of(host: LocalHost) -> int:
    """The time of every file in a wheel, in seconds since 1970: SOURCE_DATE_EPOCH, else the earliest that a zip file can hold."""
    text = host.variable("SOURCE_DATE_EPOCH") or ""
    return max(EARLIEST, int(text)) if text.isascii() and text.isdigit() and len(text) < MAX_EPOCH_DIGITS else EARLIEST


def join_logs(logs: Path) -> None:
    """Join all logs into one build.log, like the guide's ``tee build.log``."""
    with replacing(logs / "build.log", mode=PRIVATE) as whole:
        for part in sorted(logs.glob("*.log")):
            if part.name != "build.log":
                whole.write(b"===== %b =====\n%b\n" % (part.stem.encode(), part.read_bytes()))


def _copied(tree: Path, to: Path) -> Path | None:
    """Copy the tree; None where there is no room for it and for what is compiled in it."""
    try:
        if shutil.disk_usage(to.parent).free < MIN_FREE_BYTES:
            return None
        shutil.copytree(tree, to, symlinks=True)
    except OSError:
        return None
    return Path(real_path(to))


def _pack(host: LocalHost, plan: BuildPlan, tree: Path, workdir: Workdir) -> Path:
    """A wheel without ops, made by DeepSpeed's own setup.py, which is told of those that will be in it."""
    built, packed = workdir.folder / "packing-lib", workdir.folder / "packed"
    # a tree may have links at these names, which would lead out of it
    settings = tree / "setup.cfg"
    before = settings.read_bytes() if settings.is_file() else b""
    write_bytes(settings, before + f"\n[build]\nbuild_lib = {built}\n".encode())
    write_text(tree / "build.txt", f"+{plan.local_version}" if plan.local_version else "")
    lines: list[str] = []
    # build_ext is not run: dsdoctor compiles the ops
    argv = [
        plan.python,
        "setup.py",
        "build_py",
        "build_scripts",
        "bdist_wheel",
        "--skip-build",
        "--dist-dir",
        str(packed),
    ]
    hidden = Hidden(host.environment())
    env = _environment(host, plan, tree)
    status = host.stream(argv, cwd=tree, env=env, on_line=lambda line: lines.append(hidden.out_of(line)))
    write_text(workdir.logs / "wheel.log", "\n".join(lines) + "\n", mode=PRIVATE, errors="backslashreplace")
    wheels = sorted(packed.glob("*.whl")) if status == 0 else []
    if len(wheels) != 1:
        raise BuildFailed(
            f"DeepSpeed's setup.py produced no wheel: {first_error(lines) or f'it ended with status {status}'}",
            hint=f"full log: {workdir.logs / 'wheel.log'}",
        )
    return wheels[0]


def _environment(host: LocalHost, plan: BuildPlan, tree: Path) -> dict[str, str]:
    # setup.py lists its extras in the order of a set, which would differ from run to run
    env = child_environment(host, plan) | {op.variable: "1" for op in plan.ops} | {"PYTHONHASHSEED": "0"}
    # setup.py asks git for a commit: it must not find a repository that the cache folder happens to lie in
    env |= {"GIT_CEILING_DIRECTORIES": str(Path(real_path(tree)).parent)}
    # and it imports its neighbours from its own folder
    env = {name: value for name, value in env.items() if name not in {"GIT_DIR", "GIT_WORK_TREE", "PYTHONSAFEPATH"}}
    if plan.accelerator == "cuda":
        env["TORCH_CUDA_ARCH_LIST"] = ";".join(plan.architectures)
    return env


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
        book.finding(
            "op-failed",
            Severity.ERROR,
            case="not-built",
            evidence=[f"log: {result.log}"],
            affects=[result.op],
            op=result.op,
            because=result.because,
        )
        for result in results
        if result.log and not result.built
    )


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
