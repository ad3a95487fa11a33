"""The command line: parse, call, show, exit code. Results go to stdout, talk to stderr."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from dsdoctor import __version__
from dsdoctor.builder.make import refused_ops
from dsdoctor.builder.nouns import BuildResult, Wish
from dsdoctor.errors import DoctorError, UsageError
from dsdoctor.finding import Finding, Fix, Severity, has_error
from dsdoctor.report.document import document
from dsdoctor.report.progress import BuildProgress
from dsdoctor.report.terminal import finding_lines, install_hint, machine_lines, plan_lines, result_lines, show
from dsdoctor.work import Job, Order, Planned, assemble_toolkit, build, install, look, planned

IMPOSSIBLE, FAILED, INTERRUPTED = 3, 4, 130
NO_WHEEL: dict[str, Any] = {"wheel": None, "manifest": None, "ops": (), "toolkit": None}
NOTHING_MADE: dict[str, dict[str, Any]] = {
    "look": {"machine": None},
    "plan": {"plan": None},
    "build-wheel": NO_WHEEL,
    "prebuild": NO_WHEEL,
    "toolkit": {"toolkit": None},
}
"""The parts of each command's document when an error of ours left nothing to show."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Gets DeepSpeed built and keeps it running right. Exit status: 0 healthy, 1 an error was found, 2 usage, "
    "3 impossible plan, 4 build failed, 5 dsdoctor's own failure.",
)

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
    typer.Option("--source", metavar="DIR|SDIST|VERSION|git+URL",
                 help="DeepSpeed to build. Default: the installed version, else the newest release."),
]  # fmt: skip
PythonOption = Annotated[
    str, typer.Option("--python", metavar="PATH", help="Interpreter of the environment to build for.")
]
Toolkit = Annotated[
    str,
    typer.Option(metavar="auto|pypi|DIR",
                 help="auto chooses or assembles one, pypi assembles one from PyPI's parts, DIR takes that one."),
]  # fmt: skip
Accelerator = Annotated[str | None, typer.Option(metavar="cuda|cpu", help="Default: cuda for a CUDA build of torch.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Compile jobs at once. Default: what processors and memory allow.")
]
LocalVersion = Annotated[
    str | None, typer.Option(metavar="TEXT", help='Local version segment. Default: such as "cu13.0.torch2.14".')
]
NoLocalVersion = Annotated[bool, typer.Option("--no-local-version", help="Keep DeepSpeed's plain version.")]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing; say what would be needed.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder that gets the wheel.")]


@app.command("look")
def look_command(python: PythonOption = sys.executable, as_json: Json = False) -> None:
    """Show what is here: toolkits, compilers, GPUs, torch, DeepSpeed, libraries. Judges nothing."""
    with _ending("look", as_json):
        machine = look(Order(python=python))
        _print("look", as_json, machine_lines(machine), (), machine=machine)


@app.command("plan")
def plan_command(
    ops: Ops = None,
    config: For = None,
    arch: Arch = None,
    source: SourceOption = None,
    python: PythonOption = sys.executable,
    toolkit: Toolkit = "auto",
    accelerator: Accelerator = None,
    jobs: Jobs = None,
    local_version: LocalVersion = None,
    no_local_version: NoLocalVersion = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Say what build-wheel would do, with the reason of every choice. Compiles nothing."""
    wish = _wish(ops, config, arch, accelerator, toolkit, jobs, local_version, no_local_version, offline)
    with _ending("plan", as_json), planned(Order(python=python, source=source, config=config, wish=wish)) as ready:
        _show_plan("plan", as_json, ready)


@app.command("build-wheel")
def build_wheel_command(
    ops: Ops = None,
    config: For = None,
    arch: Arch = None,
    source: SourceOption = None,
    out: Out = Path("dist"),
    python: PythonOption = sys.executable,
    toolkit: Toolkit = "auto",
    accelerator: Accelerator = None,
    jobs: Jobs = None,
    local_version: LocalVersion = None,
    no_local_version: NoLocalVersion = False,
    offline: Offline = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Build a DeepSpeed wheel that fits this environment, prove it, and put it into --out.

    Looks at the machine, chooses ops, GPU architectures, toolkit and compiler, assembles a CUDA toolkit where none
    fits, compiles each op by itself, packs one wheel and proves that every op is in it and loads.
    """
    wish = _wish(ops, config, arch, accelerator, toolkit, jobs, local_version, no_local_version, offline)
    with (
        _ending("build-wheel", as_json),
        planned(Order(python=python, source=source, config=config, wish=wish)) as ready,
    ):
        if dry_run:
            _show_plan("build-wheel", as_json, ready)
            return
        result = _build("build-wheel", ready, out, as_json)
        if result.wheel and not as_json:
            show(Console(), [install_hint(result)])


@app.command("prebuild")
def prebuild_command(
    ops: Ops = None,
    config: For = None,
    arch: Arch = None,
    source: SourceOption = None,
    out: Out = Path("dist"),
    python: PythonOption = sys.executable,
    toolkit: Toolkit = "auto",
    accelerator: Accelerator = None,
    jobs: Jobs = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Build the wheel as build-wheel does, then install it into the environment (without its dependencies)."""
    wish = _wish(ops, config, arch, accelerator, toolkit, jobs, None, False, offline)
    with _ending("prebuild", as_json), planned(Order(python=python, source=source, config=config, wish=wish)) as ready:
        result = _build("prebuild", ready, out, as_json, before_document=lambda made: install(ready, made))
        if not as_json:
            show(Console(), [f"✓ installed for {ready.plan.python}: {Path(result.wheel or '').name}"])


@app.command("toolkit")
def toolkit_command(
    arch: Arch = None,
    python: PythonOption = sys.executable,
    toolkit: Toolkit = "auto",
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Print a CUDA_HOME that fits torch: one that is here and whole, else one assembled from parts."""
    wish = Wish(arch=arch, toolkit=toolkit, offline=offline)
    with _ending("toolkit", as_json):
        progress = BuildProgress(Console(stderr=True), quiet=as_json)
        root, findings = assemble_toolkit(Order(python=python, wish=wish), say=progress.say)
        _print("toolkit", as_json, [root] if root else finding_lines(findings), findings, toolkit=root)
        if root is None:
            raise typer.Exit(IMPOSSIBLE)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print dsdoctor's version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of ``python -m dsdoctor`` and of the ``dsdoctor`` script."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    app(prog_name="dsdoctor")


def _interrupt(*_: object) -> NoReturn:
    """Once is enough: a second Ctrl-C would break off the cleaning up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _wish(
    ops: str | None,
    config: Path | None,
    arch: str | None,
    accelerator: str | None,
    toolkit: str,
    jobs: int | None,
    local_version: str | None,
    no_local_version: bool,
    offline: bool,
) -> Wish:
    for given, clash in (
        (ops and config, "--ops and --for"),
        (local_version and no_local_version, "both local versions"),
    ):
        if given:
            raise typer.BadParameter(f"{clash} cannot be given together: name one")
    if accelerator not in {None, "cuda", "cpu"}:
        raise typer.BadParameter(f"--accelerator {accelerator!r} is none: it takes cuda or cpu")
    names = tuple(name.strip() for name in ops.split(",") if name.strip()) if ops is not None else None
    if names == ():
        raise typer.BadParameter('--ops is empty: name ops with "," between them, or "all"')
    return Wish(
        ops=None if names == ("default",) else names,
        arch=arch,
        accelerator=accelerator,
        toolkit=toolkit if toolkit in {"auto", "pypi"} else str(Path(toolkit).expanduser().absolute()),
        jobs=jobs,
        local_version="" if no_local_version else local_version,
        offline=offline,
    )


def _build(command: str, ready: Planned, out: Path, as_json: bool, before_document: Job | None = None) -> BuildResult:
    """Refuse an impossible plan, else build, show and leave with the right status."""
    if has_error(ready.plan.findings):
        _show_build(command, as_json, None, ready.plan.findings, ready)
        raise typer.Exit(IMPOSSIBLE)
    console = Console(stderr=True)
    if not as_json:
        show(console, [*plan_lines(ready.plan), *finding_lines(ready.plan.findings)])
    with BuildProgress(console, quiet=as_json) as progress:
        result = build(ready, out.absolute(), say=progress.say, watch=progress.step)
    if result.wheel and before_document:
        before_document(result)
    _show_build(command, as_json, result, (*ready.plan.findings, *result.findings), ready)
    if not result.wheel:
        raise typer.Exit(FAILED)
    return result


def _show_build(
    command: str, as_json: bool, result: BuildResult | None, findings: tuple[Finding, ...], ready: Planned
) -> None:
    lines = [*result_lines(result), *finding_lines(result.findings)] if result else list(finding_lines(findings))
    ops = result.ops if result else refused_ops(ready.plan)
    _print(
        command,
        as_json,
        lines,
        findings,
        wheel=result.wheel if result else None,
        manifest=result.manifest if result else None,
        ops=ops,
        toolkit=ready.plan.toolkit,
        seconds=result.seconds if result else None,
        cpu_seconds=result.cpu_seconds if result else None,
        log=result.log if result else None,
    )


def _show_plan(command: str, as_json: bool, ready: Planned) -> None:
    plan = ready.plan
    _print(command, as_json, [*plan_lines(plan), *finding_lines(plan.findings)], plan.findings, plan=plan)
    if has_error(plan.findings):
        raise typer.Exit(IMPOSSIBLE)


def _print(command: str, as_json: bool, lines: Any, findings: tuple[Finding, ...], **parts: Any) -> None:
    if as_json:
        sys.stdout.write(document(command, findings, **parts) + "\n")
    else:
        show(Console(), lines)


@contextmanager
def _ending(command: str, as_json: bool) -> Iterator[None]:
    """Turn our own errors into text and a number: one error, the next step, nothing half-made."""
    try:
        yield
    except (DoctorError, OSError) as cause:
        error = cause if isinstance(cause, DoctorError) else _system_error(cause)
        if as_json:
            sys.stdout.write(document(command, (_finding_of(error),), **NOTHING_MADE.get(command, {})) + "\n")
        else:
            lines = [f"✗ {error.message}", *([f"    Fix: {error.hint}"] if error.hint else [])]
            show(Console(stderr=True), lines)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        show(Console(stderr=True), ["✗ interrupted; what was half-made is removed, run the same command again"])
        raise typer.Exit(INTERRUPTED) from None


def _system_error(error: OSError) -> DoctorError:
    place = f": {error.filename}" if error.filename else ""
    return DoctorError(f"the system refused: {error.strerror or error}{place}", hint="mend that, then run it again")


def _finding_of(error: DoctorError) -> Finding:
    rule = "usage" if isinstance(error, UsageError) else "dsdoctor"
    fix = Fix(text=error.hint) if error.hint else None
    return Finding(rule=rule, severity=Severity.ERROR, title=error.message, fix=fix)
