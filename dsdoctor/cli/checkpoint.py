"""The command that judges a checkpoint: checkpoint."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group
from cyclopts.validators import Number

from dsdoctor.checkpoint.judge import CheckpointOrder, judge_checkpoint, no_values, repair_checkpoint
from dsdoctor.checkpoint.loading import Plan
from dsdoctor.checkpoint.merge import MergeOrder, merge_checkpoint
from dsdoctor.checkpoint.text import (
    ReadProgress,
    checkpoint_lines,
    checkpoint_parts,
    converted_lines,
    merged_lines,
    repair_lines,
)
from dsdoctor.checkpoint.universal import UniversalOrder, convert_checkpoint
from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import has_error
from dsdoctor.core.options import OUTPUT, argument, flag, option
from dsdoctor.core.requests import PythonPath

RUN = Group("The run that will load it", sort_key=1)
MODEL = Group("Merge and convert", sort_key=2)

Folder = Annotated[
    Path, argument(metavar="DIR", help="The folder that save_checkpoint was given, or one tag in it (global_step500).")
]
TagName = Annotated[
    str | None,
    option(name="--tag", metavar="TAG", help="The tag to inspect. Default: the one named in the file latest."),
]
World = Annotated[
    int | None,
    option(
        name="--world",
        metavar="N",
        validator=Number(gte=1),
        group=RUN,
        help="Total ranks of the run. Default: as saved.",
    ),
]
Stage = Annotated[
    int | None,
    option(
        name="--stage", metavar="0|1|2|3", validator=Number(gte=0, lte=3), group=RUN,
        help="Its ZeRO stage. Default: as saved.",
    ),
]  # fmt: skip
Dtype = Annotated[
    Literal["bf16", "fp16", "fp32"] | None,
    option(name="--dtype", metavar="bf16|fp16|fp32", group=RUN, help="Its type. Default: as saved."),
]
Tensor = Annotated[
    int | None,
    option(
        name="--tensor-parallel", metavar="N", validator=Number(gte=1), group=RUN,
        help="Ranks that share each tensor. Default: as saved.",
    ),
]  # fmt: skip
Pipeline = Annotated[
    int | None,
    option(
        name="--pipeline",
        metavar="N",
        validator=Number(gte=1),
        group=RUN,
        help="Its pipeline stages. Default: as saved.",
    ),
]
Load = Annotated[
    Literal["all", "no-optimizer", "module"],
    option(
        name="--load", metavar="all|no-optimizer|module", group=RUN,
        help="How the run calls load_checkpoint: no-optimizer is load_optimizer_states=False, module is load_module_only=True. "
        "Default: all.",
    ),
]  # fmt: skip
Evaluation = Annotated[
    bool,
    flag(
        name="--evaluation", group=RUN,
        help="The run's engine has no optimizer, neither passed to deepspeed.initialize nor configured.",
    ),
]  # fmt: skip
Here = Annotated[
    int | None,
    option(
        name="--ranks-here", metavar="N", validator=Number(gte=1), group=RUN,
        help="Ranks that load on this machine, to check its memory.",
    ),
]  # fmt: skip
Model = Annotated[
    Path | None,
    option(
        name="--model", metavar="CONFIG.json|DIR", group=RUN,
        help="Hugging Face configuration of the run's model, or its folder: compare names and shapes. Needs torch and "
        "transformers in the environment of --python.",
    ),
]  # fmt: skip
Deep = Annotated[
    bool,
    flag(
        name="--deep",
        help="Also read every byte: verify checksums, and find nan or inf in weights and optimizer states. Uses a few MiB.",
    ),
]
Merge = Annotated[
    Path | None,
    option(
        name="--merge", metavar="OUT", group=MODEL,
        help="Write the whole model here as safetensors with Hugging Face's index. Rerun to resume.",
    ),
]  # fmt: skip
MergeDtype = Annotated[
    Literal["fp32", "bf16"],
    option(name="--merge-dtype", metavar="fp32|bf16", group=MODEL, help="Type of the merged weights. Default: fp32."),
]
MAX_GIGABYTES = 1_000_000
LargestFile = Annotated[
    float,
    option(
        name="--largest-file", metavar="GB", validator=Number(gt=0, lte=MAX_GIGABYTES), group=MODEL,
        help="Maximum size of a merged file, in gigabytes. Default: 5.",
    ),
]  # fmt: skip
Universal = Annotated[
    Path | None,
    option(
        name="--universal", metavar="OUT", group=MODEL,
        help="Convert to a universal checkpoint with DeepSpeed's own converter, for other ranks or another type: "
        "--universal output/global_step500_universal. Shows the memory and disk it needs first, and compares the result.",
    ),
]  # fmt: skip
DoRepair = Annotated[
    bool,
    flag(
        name="--repair", group=OUTPUT,
        help="Write latest from the newest complete tag, and rename a newer one that is incomplete. Deletes nothing.",
    ),
]  # fmt: skip


def checkpoint_command(
    folder: Folder,
    /,
    *,
    tag: TagName = None,
    world: World = None,
    stage: Stage = None,
    dtype: Dtype = None,
    tensor: Tensor = None,
    pipeline: Pipeline = None,
    load: Load = "all",
    evaluation: Evaluation = False,
    ranks_here: Here = None,
    model: Model = None,
    deep: Deep = False,
    merge: Merge = None,
    merge_dtype: MergeDtype = "fp32",
    largest_file: LargestFile = 5.0,
    universal: Universal = None,
    python: PythonPath = sys.executable,
    repair: DoRepair = False,
    as_json: Json = False,
) -> int:
    """Check whether a checkpoint is complete and can be loaded.

    Shows what it contains, and whether a planned run can load it.
    Without --deep only each file's directory and tensor names are read, so a large checkpoint takes no longer than a small
    one. Needs neither torch nor DeepSpeed, and runs nothing from the files.

    Example: dsdoctor checkpoint output/checkpoint-500 --world 16 --stage 3
    """
    plan = Plan(
        world=world,
        stage=stage,
        dtype=dtype,
        tensor=tensor,
        pipeline=pipeline,
        load=load,
        evaluation=evaluation or None,
    )
    order = CheckpointOrder(folder=folder, tag=tag, plan=plan, ranks_here=ranks_here, model=model, python=python)
    if universal is not None:
        if plan != Plan() or (ranks_here, model) != (None, None) or deep or repair or merge is not None:
            raise UsageError("--universal only converts a tag", hint=f"dsdoctor checkpoint {folder} --universal OUT")
        return _convert(order, UniversalOrder(out=universal, python=python), as_json)
    if merge is not None:
        if plan != Plan() or (ranks_here, model) != (None, None) or deep or repair:
            raise UsageError(
                "--merge writes a model and plans no run", hint=f"dsdoctor checkpoint {folder} --merge OUT"
            )
        return _merge(order, MergeOrder(out=merge, dtype=merge_dtype, largest=int(largest_file * 1e9)), as_json)
    if repair:
        if plan != Plan() or (ranks_here, model) != (None, None) or deep:
            raise UsageError(
                "--repair repairs a folder and plans no run", hint=f"dsdoctor checkpoint {folder} --repair"
            )
        done = repair_checkpoint(order)
        print_result(
            "checkpoint", as_json, repair_lines(done), (), **NO_PARTS, repair=done, merged=None, universal=None
        )
        return OK
    with ReadProgress() as progress:
        judged, memory = judge_checkpoint(order, progress.judge_values if deep else no_values)
    lines = checkpoint_lines(judged, memory.available)
    print_result(
        "checkpoint",
        as_json,
        lines,
        judged.findings,
        **checkpoint_parts(judged),
        repair=None,
        merged=None,
        universal=None,
    )
    return FOUND if has_error(judged.findings) else OK


def _merge(order: CheckpointOrder, merge: MergeOrder, as_json: bool) -> int:
    with ReadProgress() as progress:
        judged, merged = merge_checkpoint(order, merge, progress)
    lines = checkpoint_lines(judged, None) if merged is None else merged_lines(judged, merged)
    print_result(
        "checkpoint",
        as_json,
        lines,
        judged.findings,
        **checkpoint_parts(judged),
        repair=None,
        merged=merged,
        universal=None,
    )
    return OK if merged is not None else FOUND


def _convert(order: CheckpointOrder, wish: UniversalOrder, as_json: bool) -> int:
    with ReadProgress() as progress:
        judged, made = convert_checkpoint(order, wish, progress, progress.tell)
    lines = checkpoint_lines(judged, None) if made is None else converted_lines(judged, made)
    parts = {**checkpoint_parts(judged), "repair": None, "merged": None, "universal": made}
    print_result("checkpoint", as_json, lines, judged.findings, **parts)
    return OK if made is not None else FOUND


NO_PARTS: dict[str, Any] = {
    "folder": None, "latest": None, "tags": (), "tag": None, "facts": None, "files": {}, "parameters": {}, "frozen": {},
    "verdict": None, "why": "", "rank_bytes": 0,
}  # fmt: skip
