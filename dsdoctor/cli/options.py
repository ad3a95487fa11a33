"""The options that commands share beside those of a build (``core.requests``), each with its help."""

from pathlib import Path
from typing import Annotated

from dsdoctor.core.options import HOW, OUTPUT, WHERE, flag, option

Json = Annotated[bool, flag(name="--json", group=OUTPUT, help="Print one JSON document, and nothing else, on stdout.")]
Verbose = Annotated[bool, flag(name=["--verbose", "-v"], group=OUTPUT, help="Show everything, including what is fine.")]
NoCache = Annotated[bool, flag(name="--no-cache", group=HOW, help="Compile every op, and cache none.")]
Out = Annotated[
    Path,
    option(name=["--out", "-o"], metavar="DIR", group=WHERE, help="Folder for the wheel. Default: dist."),
]
