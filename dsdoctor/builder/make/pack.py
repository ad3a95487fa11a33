"""A source tree -> one wheel. DeepSpeed's own setup.py packs it without the ops, while they are compiled; then they are put in.

setup.py also records which ops the wheel holds, and its version. A version ends in a tag of the wheel's content, which is known
only when every op is compiled: setup.py is given a stand-in for the tag, and the tag takes its place afterwards.
"""

import shutil
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dsdoctor.builder.make.compile import child_environment
from dsdoctor.builder.make.first_error import first_error
from dsdoctor.builder.make.workdir import Workdir
from dsdoctor.core.build_models import BuildPlan, Source
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.files import PRIVATE, make_folder, replacing, write_bytes, write_text
from dsdoctor.core.host import LocalHost
from dsdoctor.core.redaction import Hidden

STAND_IN = "tagtofollow"


@contextmanager
def packing(
    host: LocalHost, plan: BuildPlan, source: Source, workdir: Workdir, *, compiled_in: Path
) -> Iterator[Callable[[], Path]]:
    """Pack the tree beside what is done inside this block. The value waits for the wheel without ops, or raises BuildFailed.

    ``compiled_in`` is the tree that compilers use at the same time: setup.py writes into its own, and gets a copy where that
    would be the same.
    """
    tree = Path(source.folder)
    if tree.resolve() == compiled_in.resolve():
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
            f"DeepSpeed's setup.py made no wheel: {first_error(lines) or f'it ended with status {status}'}",
            hint=f"the whole log is {workdir.logs / 'wheel.log'}",
        )
    return wheels[0]


def _environment(host: LocalHost, plan: BuildPlan, tree: Path) -> dict[str, str]:
    # setup.py lists its extras in the order of a set, which would differ from run to run
    env = child_environment(host, plan) | {op.variable: "1" for op in plan.ops} | {"PYTHONHASHSEED": "0"}
    # setup.py asks git for a commit: it must not find a repository that the cache folder happens to lie in
    env |= {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    # and it imports its neighbours from its own folder
    env = {name: value for name, value in env.items() if name not in {"GIT_DIR", "GIT_WORK_TREE", "PYTHONSAFEPATH"}}
    if plan.accelerator == "cuda":
        env["TORCH_CUDA_ARCH_LIST"] = ";".join(plan.architectures)
    return env
