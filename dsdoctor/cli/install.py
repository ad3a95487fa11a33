"""The command that leads to an installed DeepSpeed whose ops load: install."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

from dsdoctor.builder.build import BuildScreen
from dsdoctor.builder.install import InstallAction, Installed, install
from dsdoctor.cli.build_wheel import show_plan_of
from dsdoctor.cli.ending import FAILED, FOUND, IMPOSSIBLE, OK, print_result
from dsdoctor.cli.options import Json, NoCache, Out
from dsdoctor.core.files import check_folder
from dsdoctor.core.finding import Severity, has_error
from dsdoctor.core.options import WHERE, flag, options
from dsdoctor.core.requests import BuildOrder, PythonPath
from dsdoctor.ui.progress import BuildProgress
from dsdoctor.ui.terminal import VerdictLine, finding_lines, result_lines

Indexes = Annotated[
    tuple[str, ...],
    options(
        name="--index-url", metavar="URL|DIR", group=WHERE,
        help="Package index or folder with DeepSpeed wheels. Repeatable. If a wheel fits, it is installed and nothing is built.",
    ),
]  # fmt: skip
Build = Annotated[bool, flag(name="--build", help="Build, even if an installed DeepSpeed or a listed wheel fits.")]


def install_command(
    *,
    order: BuildOrder | None = None,
    index_url: Indexes = (),
    build: Build = False,
    out: Out = Path("dist"),
    python: PythonPath = sys.executable,
    no_cache: NoCache = False,
    as_json: Json = False,
) -> int:
    """Install DeepSpeed with compiled ops that load: keep what fits, else install a wheel from an index, else build one.

    An installed DeepSpeed is kept if it fits this machine and has the ops of --ops or --for. Otherwise the newest wheel in the
    indexes that passes `dsdoctor verify` is installed. If none passes, one is built as with build-wheel. Then each op is loaded.
    torch is never changed. An installed DeepSpeed keeps its version unless --source names another.
    Build options (--arch, --cpu, --accelerator, --node, --toolkit, ...) start a build at once.

    Example: dsdoctor install --for ds_config.json
    """
    order = replace(order or BuildOrder(), python=python, cache=not no_cache)
    check_folder(out, "--out")
    with BuildProgress() as progress:
        screen = BuildScreen(say=progress.say, plan=lambda plan: show_plan_of(plan, as_json), step=progress.step)
        done = install(order, index_url, out.absolute(), screen=screen, build_anew=build)
    show_installed("install", done, as_json)
    return status_of(done)


def show_installed(command: str, done: Installed, as_json: bool) -> None:
    """What was done and what the environment has now; the last line names the ops that load."""
    print_result(
        command,
        as_json,
        installed_lines(done),
        done.findings,
        did=done.did,
        version=done.version,
        wheel=done.wheel,
        ops=done.ops,
        untried=done.untried,
        candidates=done.candidates,
    )


def installed_lines(done: Installed) -> Iterator[str]:
    """Wheels that were not taken with the reason, the build, the findings, and how it ended."""
    for candidate in done.candidates:
        if not candidate.fits:
            yield f"· {unquote(candidate.wheel.rpartition('/')[2])}"
            yield from (f"    {finding.title}" for finding in candidate.findings if finding.severity is Severity.ERROR)
    if done.built is not None and done.built.result is not None:
        yield from result_lines(done.built.result)
    yield from finding_lines(done.findings)
    how = {
        InstallAction.KEPT: "was there and fits",
        InstallAction.INSTALLED: f"from {done.wheel}",
        InstallAction.BUILT: "built here",
    }
    if done.did is InstallAction.NOTHING or done.version is None:
        yield VerdictLine("✗ nothing was installed")
        return
    yield f"{'✗' if has_error(done.findings) else '·'} DeepSpeed {done.version}, {how[done.did]}"
    if done.untried:
        yield f"! {', '.join(done.untried)} could not be tried here"
    if done.ops:
        yield VerdictLine(f"✓ {', '.join(done.ops)} {'load' if len(done.ops) > 1 else 'loads'}")


def status_of(done: Installed) -> int:
    """The exit status: nothing could be planned, a build failed, an op does not load, or all is well."""
    if done.did is InstallAction.NOTHING:
        return IMPOSSIBLE if done.built is not None and done.built.result is None else FAILED
    return FOUND if has_error(done.findings) else OK
