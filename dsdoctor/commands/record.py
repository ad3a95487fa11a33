"""record: this machine, and the ops of the DeepSpeed at hand -> a snapshot in a file."""

from pathlib import Path

import msgspec

from dsdoctor.builder.source.ops import source_at_hand
from dsdoctor.core.errors import DoctorError
from dsdoctor.core.files import check_target
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.snapshot import Recorder, save
from dsdoctor.core.workspace import cache_folder
from dsdoctor.probe import probe
from dsdoctor.probe.observe import Observation, Say


def write_down(python: str, file: Path, *, offline: bool, say: Say) -> Machine:
    """Write this machine down into a file, with the ops of the DeepSpeed at hand. Raises UsageError where it cannot be written."""
    check_target(file)
    recorder = Recorder(LocalHost())
    cache = cache_folder(recorder)
    machine = probe(recorder, python=python, cache=str(cache), whole=True)
    snapshot = recorder.snapshot
    snapshot.python, snapshot.cache = python, str(cache)
    try:
        observation = Observation(machine=machine, cache=str(cache))
        snapshot.source = msgspec.to_builtins(source_at_hand(observation, None, BuildRequest(offline=offline), say=say))
    except DoctorError as error:
        say(f"without the ops of a DeepSpeed: {error.message}")
    save(snapshot, file, home=str(Path.home()))
    return machine
