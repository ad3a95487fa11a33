"""record: this machine, and the ops of the DeepSpeed at hand -> a snapshot in a file."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec

from dsdoctor.builder.source.ops import source_at_hand
from dsdoctor.cli.ending import print_result
from dsdoctor.cli.options import Json
from dsdoctor.core.errors import DoctorError
from dsdoctor.core.files import check_target
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.options import argument
from dsdoctor.core.redaction import urls
from dsdoctor.core.requests import BuildRequest, Offline, PythonPath
from dsdoctor.core.snapshot import Recorder, save
from dsdoctor.core.workspace import cache_folder
from dsdoctor.probe import probe
from dsdoctor.probe.observe import Observation, Say
from dsdoctor.ui.progress import BuildProgress


def record_command(
    file: Annotated[Path, argument(help="The file to write.")],
    /,
    *,
    python: PythonPath = sys.executable,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Save a snapshot of this machine to a file.

    check, plan, env, verify and compare read it with --machine, on any machine. It contains only what dsdoctor asked for: no
    tokens, no unrelated variables, and the home folder as /home/user.

    Example: dsdoctor machine record node1.json
    """
    with BuildProgress() as progress:
        write_down(python, file, offline=offline, say=progress.say)
    print_result("machine record", as_json, [f"✓ {file}  (review it before you share it)"], (), file=str(file))


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
        say(f"without the ops of a DeepSpeed: {urls(error.message)}")
    save(snapshot, file, home=str(Path.home()))
    return machine
