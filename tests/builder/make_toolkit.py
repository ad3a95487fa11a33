"""Assembles the toolkit of a plan that is written in a file: a process that tests kill. Prints how it ended."""

import os
import sys
from pathlib import Path

import msgspec

from dsdoctor.builder.toolkit.assemble import assemble
from dsdoctor.core.build_models import ToolkitPlan
from dsdoctor.core.errors import DoctorError
from dsdoctor.core.host import LocalHost

if __name__ == "__main__":
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ToolkitPlan)
    try:
        assemble(
            LocalHost(env=dict(os.environ)),
            plan,
            python="/no",
            architectures=("8.0",),
            compiler="/usr/bin/gcc",
            say=print,
        )
    except DoctorError as error:
        sys.exit(error.message)
