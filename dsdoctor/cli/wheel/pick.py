"""The command that chooses among wheels: pick."""

import sys
from functools import partial
from typing import Annotated

from dsdoctor.builder.verify import candidate_lines, pick
from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.core.finding import step
from dsdoctor.core.options import argument, option
from dsdoctor.core.requests import MachineFile, PythonPath
from dsdoctor.ui.terminal import Stream, show_talk

Place = Annotated[str, argument(help="Folder of wheels, or URL of a package index.")]
Op = Annotated[str, option(name="--op", metavar="OP,OP", help="Ops that the wheel must contain.")]


def pick_command(
    place: Place,
    /,
    *,
    op: Op = "",
    python: PythonPath = sys.executable,
    machine: MachineFile = None,
    as_json: Json = False,
) -> int:
    """Find the DeepSpeed wheel in a folder or package index that fits this machine, or explain why none does.

    Each wheel is checked as by verify: Python and platform, torch and CUDA release, GPU architectures, processor instructions,
    glibc, and linked libraries. From an index, wheels whose names show another Python or torch are not fetched. Nothing in a
    wheel is run.

    Example: dsdoctor wheel pick /srv/wheels --op fused_adam
    """
    ops = tuple(name.strip() for name in op.split(",") if name.strip())
    found = pick(python, machine, place, ops, say=partial(show_talk, Stream(stderr=True)))
    best = found[0] if found[0].fits else None
    interpreter = "python" if python == sys.executable else python
    bound = f"{best.wheel}#sha256={best.sha256}" if best and best.sha256 else best.wheel if best else ""
    install = step("{python} -m pip install {wheel}", python=interpreter, wheel=bound).line if best else None
    findings = () if best else tuple(finding for candidate in found for finding in candidate.findings)
    lines = candidate_lines([(candidate.wheel, candidate.fits, candidate.findings) for candidate in found], install)
    print_result("wheel pick", as_json, lines, findings, wheel=best.wheel if best else None, wheels=found)
    return OK if best else FOUND
