"""The command that builds: build-wheel."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from dsdoctor.builder.build import (
    AfterBuild,
    BuildOutcome,
    BuildScreen,
    build,
    build_command,
    prepare_plan,
    publish_into,
)
from dsdoctor.builder.build_targets import ListedTarget, chosen_target, list_targets, targets_of
from dsdoctor.builder.make.make_wheel import refused_ops
from dsdoctor.cli.ending import FAILED, IMPOSSIBLE, OK, print_result
from dsdoctor.cli.matrix import run_matrix
from dsdoctor.cli.options import Json, NoCache, Out, Verbose
from dsdoctor.core.build_models import BuildPlan
from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import check_folder
from dsdoctor.core.finding import Step, has_error, step, with_options
from dsdoctor.core.options import TARGET, WHERE, flag, option, options
from dsdoctor.core.requests import BuildOrder, MachineFile
from dsdoctor.probe.observe import probe_for_build
from dsdoctor.ui.progress import BuildProgress
from dsdoctor.ui.screen import install_lines, plan_end_lines, plan_lines, result_lines
from dsdoctor.ui.terminal import Stream, finding_lines, show

Index = Annotated[
    Path | None,
    option(
        name="--index", metavar="DIR", group=WHERE,
        help="Also add the wheel to this package index (PEP 503, static files).",
    ),
]  # fmt: skip
Pythons = Annotated[
    tuple[str, ...],
    options(
        name="--python", metavar="PATH|VERSION", group=TARGET,
        help="Interpreter of the environment to build for, or a version such as 3.12 to search for. Repeatable. "
             "Default: the one that runs dsdoctor.",
    ),
]  # fmt: skip
Torches = Annotated[
    tuple[str, ...],
    options(
        name="--torch", metavar="VERSION", group=TARGET,
        help="Build for this torch in its own environment. Repeatable; every --python is combined with every --torch.",
    ),
]  # fmt: skip
Cudas = Annotated[
    tuple[str, ...],
    options(
        name="--cuda", metavar="RELEASE|cpu", group=TARGET,
        help="CUDA release of each --torch, such as 12.8, from torch's own index. Repeatable. Default: what pip's index has.",
    ),
]  # fmt: skip
TorchIndex = Annotated[
    str | None,
    option(name="--torch-index", metavar="URL", group=TARGET, help="Package index with the builds of --torch."),
]
Listed = Annotated[bool, flag(name="--targets", group=TARGET, help="List the targets, numbered, and exit.")]
Chosen = Annotated[
    int | None,
    option(
        name="--target", metavar="N", group=TARGET,
        help="Build only target N, counted from 0: one task of a Slurm array or an indexed Kubernetes Job.",
    ),
]  # fmt: skip
DEFAULT_OUT = Path("dist")
DryRun = Annotated[bool, flag(name="--dry-run", help="Show the plan, with the reason for each choice, and exit.")]


def build_wheel_command(
    *,
    order: BuildOrder | None = None,
    out: Out = DEFAULT_OUT,
    index: Index = None,
    python: Pythons = (),
    torch: Torches = (),
    cuda: Cudas = (),
    torch_index: TorchIndex = None,
    targets: Listed = False,
    target: Chosen = None,
    no_cache: NoCache = False,
    dry_run: DryRun = False,
    machine: MachineFile = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Build a DeepSpeed wheel for this environment and verify it.

    Inspects the machine and selects ops, GPU architectures, toolkit and compiler. If no CUDA toolkit fits, one is assembled.
    Each op is compiled separately. The finished wheel is checked: it must contain every op, and each op must load.
    With --torch, it builds one wheel for each release. With --dry-run it compiles nothing, and -v and --machine apply.

    Example: dsdoctor build-wheel --ops cpu_adam,fused_adam --arch "8.0;9.0"
    """
    if not dry_run and (machine is not None or verbose):
        raise UsageError(f"{'--verbose' if machine is None else '--machine'} needs --dry-run", hint="add --dry-run")
    listed = list_targets(python, torch, cuda)
    if targets:
        return _show_targets(listed, as_json)
    if target is not None:
        one = chosen_target(listed, target)
        python, torch, cuda = (one.python,), (one.torch,) if one.torch else (), (one.cuda,) if one.cuda else ()
    wanted = targets_of(python, torch, cuda, torch_index)
    order = replace(order or BuildOrder(), python=wanted[0].python, machine=machine, cache=not no_cache)
    index = index.absolute() if index else None
    check_folder(out, "--out")
    if index:
        check_folder(index, "--index")
    if torch or len(wanted) > 1:
        if machine is not None:
            raise UsageError(
                "--machine is for one environment, and several are to be planned", hint="leave out --torch"
            )
        return run_matrix(order, wanted, out.absolute(), index, dry_run=dry_run, as_json=as_json)
    if dry_run:
        return _show_plan(order, _own_options(out, index, no_cache=no_cache), verbose=verbose, as_json=as_json)
    after = partial(publish_into, index) if index else None
    return build_and_show("build-wheel", order, out, after=after, as_json=as_json, at_end=install_lines)


def _show_plan(order: BuildOrder, own: Iterable[Step], *, verbose: bool, as_json: bool) -> int:
    """Plan, show the plan, and return whether it can be carried out."""
    with probe_for_build(order) as observing:
        observation = observing.final()
    with prepare_plan(order, observation) as ready:
        plan = ready.plan
    lines = [*plan_lines(plan), *plan_end_lines(plan, verbose=verbose, build=with_options(build_command(order), own))]
    print_result("build-wheel", as_json, lines, plan.findings, plan=plan)
    return IMPOSSIBLE if has_error(plan.findings) else OK


def _own_options(out: Path, index: Path | None, *, no_cache: bool) -> Iterator[Step]:
    """Those that the order of a plan does not have."""
    if out != DEFAULT_OUT:
        yield step("--out {folder}", folder=str(out))
    if index is not None:
        yield step("--index {folder}", folder=str(index))
    if no_cache:
        yield step("--no-cache")


def _show_targets(listed: tuple[ListedTarget, ...], as_json: bool) -> int:
    """The numbered list; a workflow takes it by fromJSON."""
    lines = [
        " ".join(
            filter(
                None, (str(one.number), one.python, one.torch and f"torch {one.torch}", one.cuda and f"CUDA {one.cuda}")
            )
        )
        for one in listed
    ]
    print_result("build-wheel", as_json, lines, (), targets=listed)
    return OK


def build_and_show(
    command: str,
    order: BuildOrder,
    out: Path,
    *,
    after: Callable[[], AfterBuild] | None,
    as_json: bool,
    at_end: Callable[[BuildPlan, str], Iterable[str]],
    reuse: bool = True,
) -> int:
    """Build, show what came of it and, at the end of a good build, a line about its result."""
    check_folder(out, "--out")
    with BuildProgress() as progress:
        screen = BuildScreen(say=progress.say, plan=lambda plan: show_plan_of(plan, as_json), step=progress.step)
        built = build(order, out.absolute(), screen=screen, after=after, reuse=reuse)
    if built.kept:
        talk = "* nothing has changed since this wheel was built: taken from the cache"
        show(Stream(stderr=True), [talk])
    _show_built(command, built, as_json)
    if built.result is None:
        return IMPOSSIBLE
    if not built.result.wheel or has_error(built.result.findings):
        return FAILED
    if not as_json:
        show(Stream(), at_end(built.plan, built.result.wheel))
    return OK


def show_plan_of(plan: BuildPlan, as_json: bool) -> None:
    """The plan that is about to be carried out."""
    if not as_json:
        show(Stream(stderr=True), [*plan_lines(plan), *finding_lines(plan.findings)])


def _show_built(command: str, built: BuildOutcome, as_json: bool) -> None:
    result, plan = built.result, built.plan
    lines = [*result_lines(result), *finding_lines(result.findings)] if result else list(finding_lines(plan.findings))
    print_result(
        command,
        as_json,
        lines,
        built.findings,
        wheel=result.wheel if result else None,
        manifest=result.manifest if result else None,
        ops=result.ops if result else refused_ops(plan),
        toolkit=plan.toolkit,
        seconds=result.seconds if result else None,
        cpu_seconds=result.cpu_seconds if result else None,
        log=result.log if result else None,
    )
