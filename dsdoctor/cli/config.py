"""The command that judges a DeepSpeed configuration: config."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Group
from cyclopts.validators import Number

from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json, Verbose
from dsdoctor.config.check import (
    ConfigOrder,
    config_lines,
    config_schema,
    fix_config,
    fixed_lines,
    judge_config,
    parse_gpus,
)
from dsdoctor.config.judge import corrections_of
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import has_error
from dsdoctor.core.options import OUTPUT, TARGET, argument, option
from dsdoctor.core.requests import MachineFile, PythonPath

BESIDE = Group("The rest of the setup", sort_key=1)

File = Annotated[
    str | None,
    argument(help="ds_config.json (JSON or Hjson), or its text in base64, as --deepspeed_config takes it."),
]
Arguments = Annotated[
    Path | None,
    option(
        name="--hf", metavar="ARGS.json|train.yaml", group=BESIDE,
        help='TrainingArguments of transformers: each "auto" is filled in as the Trainer does, the rest compared.',
    ),
]  # fmt: skip
AccelerateFile = Annotated[
    Path | None,
    option(
        name="--accelerate",
        metavar="CONFIG.yaml",
        group=BESIDE,
        help="accelerate's configuration, checked the same way.",
    ),
]
Model = Annotated[
    Path | None,
    option(
        name="--model",
        metavar="CONFIG.json|DIR",
        group=BESIDE,
        help="The model's config.json, for sizes that depend on it.",
    ),
]
World = Annotated[
    int | None,
    option(
        name="--world", metavar="N", validator=Number(gte=1), group=BESIDE,
        help="Data-parallel ranks, for the batch sizes. Default: a number that fits them.",
    ),
]  # fmt: skip
Gpus = Annotated[
    str | None,
    option(name="--gpus", metavar="8x80G", group=BESIDE, help="The GPUs, one for each rank."),
]
Source = Annotated[
    str | None,
    option(
        name="--source", metavar="DIR|SDIST|VERSION", group=TARGET,
        help="Ask this DeepSpeed instead of the installed one. It needs the environment's torch.",
    ),
]  # fmt: skip
FixOut = Annotated[
    Path | None,
    option(
        name="--fix", metavar="OUT", group=OUTPUT,
        help="Write the corrected configuration here, comments kept. The file itself is not changed.",
    ),
]  # fmt: skip

Schema = Annotated[
    bool,
    option(
        name="--schema", negative="", group=OUTPUT,
        help="Print the JSON schema of ds_config.json, for editors, and check nothing. Also without DeepSpeed.",
    ),
]  # fmt: skip


def config_command(
    file: File = None,
    /,
    *,
    hf: Arguments = None,
    accelerate: AccelerateFile = None,
    model: Model = None,
    world: World = None,
    gpus: Gpus = None,
    machine: MachineFile = None,
    fix: FixOut = None,
    source: Source = None,
    schema: Schema = False,
    python: PythonPath = sys.executable,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Check what DeepSpeed does with a ds_config.json.

    Finds keys that are misspelt, ignored, rejected or read differently, before a run.
    Asks the installed DeepSpeed itself, in a separate process, which keys it reads, what it rejects, and which optimizer and
    scheduler it creates. Without one, uses the keys and types that its releases read. Trains nothing, compiles nothing.

    Example: dsdoctor config ds_config.json --hf training_args.json --world 8
    """
    if schema:
        sys.stdout.write(json.dumps(config_schema(ConfigOrder(file="", python=python, source=source)), indent=2) + "\n")
        return OK
    if file is None:
        raise UsageError("no configuration is named", hint="dsdoctor config ds_config.json")
    order = ConfigOrder(file=file, python=python, arguments=hf, accelerate=accelerate, model=model, machine=machine)
    counted = parse_gpus(gpus) if gpus is not None else None
    order = replace(order, world=world, ranks=None if world else counted, source=source)
    fixed = fix_config(order, fix) if fix is not None else None
    judged = (fixed.before if fixed.refused else fixed.after) if fixed else judge_config(order)
    findings = fixed.findings if fixed else judged.findings
    print_result(
        "config",
        as_json,
        fixed_lines(fixed, str(fix)) if fixed else config_lines(judged, file, verbose=verbose),
        findings,
        deepspeed=judged.asked.version,
        effective=judged.asked.facts,
        filled=judged.asked.filled.filled if judged.asked.filled else (),
        corrections=fixed.corrections if fixed and not fixed.refused else tuple(corrections_of(judged.verdicts)),
    )
    return FOUND if has_error(findings) else OK
