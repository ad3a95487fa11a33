"""install: a DeepSpeed that fits stays, else the best wheel of the indexes, else one that is built; then each op is loaded."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from dsdoctor.builder.build import BuildOutcome, BuildScreen, build
from dsdoctor.builder.plan.choices import accelerator_of
from dsdoctor.builder.source.fetch import NEWEST, spell_source
from dsdoctor.builder.source.op_loads import ops_of_config
from dsdoctor.builder.source.training_config import read_config, training_configs
from dsdoctor.builder.targets import find_uv
from dsdoctor.builder.verify import Candidate, WheelCandidates, verify, version_of
from dsdoctor.builder.wheel.read import hex_of, read_wheel
from dsdoctor.core.build_models import BuildPlan, BuildResult
from dsdoctor.core.errors import BuildFailed, UsageError
from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.pip import install_needs, install_wheel
from dsdoctor.core.requests import BuildOrder
from dsdoctor.core.text import and_more
from dsdoctor.hosts.install import Sent
from dsdoctor.probe.observe import Observation, observe
from dsdoctor.rules import book


class InstallAction(enum.Enum):
    """How the environment came to its DeepSpeed."""

    KEPT = "kept"
    INSTALLED = "installed"
    BUILT = "built"
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What was done. ``ops`` load now; ``untried`` could not be tried here. ``candidates`` are the wheels that were looked at."""

    did: InstallAction
    version: str | None = None
    wheel: str | None = None
    ops: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    findings: tuple[Finding, ...] = ()
    built: BuildOutcome | None = None


def install(order: BuildOrder, places: Sequence[str], out: Path, *, screen: BuildScreen, build_anew: bool) -> Installed:
    """Bring the environment to a DeepSpeed that fits it and holds the ops that the order names.

    ``places``: folders and package indexes with wheels. ``build_anew``: neither what is installed nor a listed wheel is taken.
    Raises UsageError, ImpossiblePlan, BuildFailed.
    """
    observation = observe(order.python, None, whole=False)
    wanted = _named_ops(order, observation.machine)
    if not build_anew:
        if (kept := _kept(order, observation, wanted)) is not None:
            return kept
        if places and not asks_for_a_build(order):
            chosen = _from_indexes(order, places, observation, wanted, screen)
            if chosen.did is InstallAction.INSTALLED or chosen.findings:
                return chosen
            return replace(_build(order, out, screen), candidates=chosen.candidates)
    return _build(order, out, screen)


def install_built(plan: BuildPlan, result: BuildResult) -> tuple[Finding, ...]:
    """Install a wheel that was built into the environment it was built for; a finding when that fails: the wheel stays."""
    assert result.wheel is not None
    return _install_wheel(plan.python, result.wheel, None)


def files_to_send(wheel: Path) -> tuple[Sent, ...]:
    """A wheel for other hosts, and the manifest beside it. Raises UsageError for what is not a complete DeepSpeed wheel."""
    built = read_wheel(wheel)
    if built.altered:
        title = f"{len(built.altered)} files of {wheel} differ from its RECORD: {built.altered[0]}"
        raise UsageError(title, hint="fetch or build it again")
    if built.foreign:
        title = f"{wheel} would install files that do not belong to DeepSpeed: {and_more(built.foreign)}"
        raise UsageError(title, hint="do not install it; build the wheel from DeepSpeed's source")
    if wrong := built.contradictions or built.addresses:
        told = "does not match its file name" if built.contradictions else "would have pip fetch"
        raise UsageError(
            f"{wheel} {told}: {and_more(wrong)}", hint="do not install it; build the wheel from DeepSpeed's source"
        )
    beside = wheel.with_name(f"{wheel.name}.json")
    paths = (wheel, beside) if beside.is_file() else (wheel,)
    return tuple(Sent(path=path, size=path.stat().st_size, sha256=hex_of(path)) for path in paths)


def asks_for_a_build(order: BuildOrder) -> bool:
    """Whether the order says how to build (``--arch``, ``--cpu``, ...): no wheel that is there already was built by that."""
    request = order.request
    asked = (request.arch, request.cpu, request.accelerator, request.local_version, order.nodes)
    return any(asked) or request.toolkit != "auto" or request.debug_info or request.no_local_version


def _named_ops(order: BuildOrder, machine: Machine) -> tuple[str, ...]:
    """The ops that the order names one by one; none where it leaves the choice to the build."""
    if order.config is not None:
        decided = training_configs(read_config(order.config), name=str(order.config))
        return tuple(ops_of_config(decided, accelerator=accelerator_of(machine, order.request)))
    asked = order.request.ops or ()
    return () if asked in {("all",), ("default",)} else asked


def _kept(order: BuildOrder, observation: Observation, wanted: tuple[str, ...]) -> Installed | None:
    """What is installed, where it is of the version that is asked for, fits, and has ops, all that are wanted among them."""
    there = observation.machine.deepspeed
    if there is None or not _is_version(there.version, order.source) or not there.installed_ops:
        return None
    if not set(wanted) <= set(there.installed_ops) or order.request.ops == ("all",) or asks_for_a_build(order):
        return None
    outcome = _outcome(InstallAction.KEPT, order.python)
    return None if has_error(outcome.findings) else outcome


def _from_indexes(
    order: BuildOrder, places: Sequence[str], observation: Observation, wanted: tuple[str, ...], screen: BuildScreen
) -> Installed:
    """The first wheel that fits, the newest first; of another version than asked for none is taken.

    With findings and NOTHING done: one fits, and could not be installed.
    """
    version = _asked_version(order, observation)
    seen: list[Candidate] = []
    with WheelCandidates(places, observation, order.python, say=screen.say) as candidates:
        for wheel in candidates.wheels:
            if version is not None and version_of(wheel) != version:
                other = book.finding(
                    "wheel-name-mismatch",
                    Severity.ERROR,
                    case="not-asked-for" if order.source else "not-installed",
                    named=str(version_of(wheel)),
                    version=str(version),
                )
                seen.append(Candidate(wheel=wheel.name, built=None, findings=(other,)))
                continue
            candidate, path = candidates.judge(wheel, wanted)
            seen.append(candidate)
            if candidate.fits and path is not None:
                screen.say(f"installing {wheel.name}")
                failed = _install_wheel(order.python, str(path), observation.machine)
                if has_error(failed):
                    return Installed(
                        did=InstallAction.NOTHING, wheel=candidate.wheel, candidates=tuple(seen), findings=failed
                    )
                done = _outcome(InstallAction.INSTALLED, order.python)
                findings = (*failed, *done.findings)
                return replace(done, wheel=candidate.wheel, candidates=tuple(seen), findings=findings)
    return Installed(did=InstallAction.NOTHING, candidates=tuple(seen))


def _build(order: BuildOrder, out: Path, screen: BuildScreen) -> Installed:
    built = build(order, out, screen=screen, after=lambda: install_built, reuse=True)
    if built.result is None or not built.result.wheel or has_error(built.findings):
        return Installed(did=InstallAction.NOTHING, built=built, findings=built.findings)
    done = _outcome(InstallAction.BUILT, order.python)
    return replace(done, wheel=built.result.wheel, built=built, findings=(*built.findings, *done.findings))


def _install_wheel(python: str, wheel: str, machine: Machine | None) -> tuple[Finding, ...]:
    """The wheel, then what it needs beside itself; torch is left as it is."""
    host = LocalHost()
    uv = find_uv(host)
    try:
        install_wheel(host, python, wheel, uv=uv)
    except BuildFailed as error:
        why = error.message
        return (book.finding("wheel-not-installed", Severity.ERROR, why=why, python=python, wheel=wheel),)
    torch = (machine or observe(python, None, whole=False).machine).torch
    failed = install_needs(host, python, wheel, torch.version, uv=uv) if torch else None
    if failed is None:
        return ()
    version = _installed_version(python)
    return (book.finding("dependencies-not-installed", Severity.WARNING, why=failed, python=python, version=version),)


def _installed_version(python: str) -> str:
    there = observe(python, None, whole=False).machine.deepspeed
    return there.version if there else ""


def _outcome(did: InstallAction, python: str) -> Installed:
    """What the environment has now, each op loaded."""
    now = verify(python, None, None, load=True)
    failed = {op for finding in now.findings if finding.rule == "op-does-not-load" for op in finding.affects}
    untried = {op for finding in now.findings if finding.rule == "not-proven" for op in finding.affects}
    if has_error(tuple(finding for finding in now.findings if finding.rule != "op-does-not-load")):
        untried |= set(now.built.installed_ops)  # a DeepSpeed that does not fit was not loaded
    ops = tuple(op for op in now.built.installed_ops if op not in failed | untried)
    return Installed(did=did, version=now.built.version, ops=ops, untried=tuple(sorted(untried)), findings=now.findings)


def _asked_version(order: BuildOrder, observation: Observation) -> Version | None:
    """The version that --source names, else that of the DeepSpeed that is installed; None for the newest.

    Raises UsageError for a source that is no version: no index has a wheel of it.
    """
    spec, _ = spell_source(order.source, observation.machine.deepspeed)
    if spec == NEWEST:
        return None
    try:
        return Version(spec)
    except ValueError:
        raise UsageError(
            f"--source {spec} is not a version, and an index has only releases", hint="add --build"
        ) from None


def _is_version(installed: str, source: str | None) -> bool:
    """Whether an installed version is the one that --source names; without it any is."""
    if source is None:
        return True
    try:
        return Version(installed).public == Version(source).public
    except ValueError:
        return False
