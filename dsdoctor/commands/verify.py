"""verify: a built DeepSpeed against a machine -> findings. Runs nothing of it unless it is to load the installed ops."""

from dataclasses import replace
from pathlib import Path

from dsdoctor.builder.wheel.attested import judge_attestations
from dsdoctor.builder.wheel.load import load_installed
from dsdoctor.builder.wheel.read import read_installed, read_wheel
from dsdoctor.commands.judge import Verified, judge
from dsdoctor.commands.shelf import Shelf
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import has_error
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import DeepSpeed
from dsdoctor.probe.observe import Observation, Say, observe


def verify(python: str, machine: Path | None, wheel: Path | None, *, load: bool = False) -> Verified:
    """Judge a wheel, or (None) the installed DeepSpeed, against a machine. Raises UsageError for what is no such wheel.

    ``load`` tries the installed ops too: the one thing here that runs them.
    """
    if load and (wheel is not None or machine is not None):
        raise UsageError("--load tries the DeepSpeed that is installed here", hint="dsdoctor verify --installed --load")
    # a file that is not a wheel is refused before the machine is asked
    read = read_wheel(wheel) if wheel is not None else None
    observation = observe(python, machine, whole=False)
    built = read or _installed(observation)
    judged = judge(observation, built, python)
    if wheel is not None:
        return replace(judged, findings=judged.findings + judge_attestations(wheel))
    if load and not has_error(judged.findings):
        asked = judged.machine.python.executable if judged.machine.python else python
        loaded = load_installed(LocalHost(), asked, built, judged.machine)
        return replace(judged, findings=judged.findings + loaded)
    return judged


def verify_listed(python: str, machine: Path | None, url: str, *, say: Say) -> Verified:
    """Judge the wheel that an address names, or of an index the one that fits best. Raises UsageError where none can be judged."""
    observation = observe(python, machine, whole=False)
    with Shelf([url], observation, python, say=say) as shelf:
        best = shelf.ranked(())[0]
    if best.built is None:
        raise UsageError(f"{best.wheel}: {best.findings[0].title}", hint="name another wheel")
    machine_with = replace(observation.machine, deepspeed=best.built)
    return Verified(machine=machine_with, built=best.built, findings=best.findings)


def _installed(observation: Observation) -> DeepSpeed:
    """The installed DeepSpeed with what its files say, where they are at hand."""
    installed = observation.machine.deepspeed
    if installed is None:
        raise UsageError(
            "no DeepSpeed is installed there", hint="name a wheel, or another environment with --python PATH"
        )
    return read_installed(installed) if observation.is_here else installed
