"""Is each verdict "loads / needs universal / cannot" what real ranks do? Checkpoints of two ranks, loaded by 1, 2 and 4.

    python benchmarks/checkpoint.py --json FILE            # the whole table: about five minutes on two processors
    python benchmarks/checkpoint.py --every 9 --worlds 2   # a sample of it
    python benchmarks/checkpoint.py --kinds zero1-bf16     # those of one kind

Generated: kind x saved stage x saved type x planned stage x planned type x ranks x cut of tensors x how it is loaded, as it is and
converted. Exits with 1 where one disagrees.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsdoctor.checkpoint.folder import look
from dsdoctor.checkpoint.judge import judge
from dsdoctor.checkpoint.loading import ALL, MODULE, NO_OPTIMIZER, PROVEN_WITH, Plan, Verdict
from tests.checkpoint import real

TAG = "global_step2"
BOTH = ("fp32", "bf16")
DTYPES = {
    "zero": BOTH,
    "evaluation": BOTH,
    "frozen": ("fp32",),
    "experts": ("bf16",),
    "pipeline": BOTH,
    "tensors": BOTH,
}
STAGES = {
    "zero": (0, 1, 2, 3),
    "evaluation": (0, 1, 2, 3),
    "frozen": (1, 2, 3),
    "experts": (0, 1, 2),
    "pipeline": (0, 1),
    "tensors": (0, 1, 2),
}
ARGUMENTS = {ALL: {}, NO_OPTIMIZER: {"load_optimizer_states": False}, MODULE: {"load_module_only": True}}


def plans(name: str, world: int) -> list[Plan]:
    """Every run that is tried with a checkpoint."""
    kind = name.rstrip("0123-bfp6")
    if world == 1 and kind in {"experts", "pipeline"}:
        return []
    loads = tuple(ARGUMENTS) if kind in {"zero", "evaluation"} else (ALL,)
    # whether the run's engine has an optimizer is the same question for any number of ranks
    engines = (None, True) if kind == "zero" and world == 2 else (None, False) if kind == "evaluation" else (None,)
    cuts = [each for each in (1, 2, 4) if each <= world] if kind == "tensors" else [None]
    return [
        Plan(world=world, stage=stage, dtype=dtype, tensor=tensor, load=load, evaluation=engine)
        for engine, stage, dtype, tensor, load in itertools.product(engines, STAGES[kind], DTYPES[kind], cuts, loads)
    ]


def main() -> int:
    """Make, judge, load, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kinds", nargs="+", default=[])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = table(folder, real.make(folder, *given.kinds), given.every, given.worlds)
    counted = Counter(row["verdict"] for row in rows)
    wrong = [row for row in rows if row["agrees"] is False]
    healthy = [row for row in rows if row["alarms"]]
    text = {
        "deepspeed": PROVEN_WITH,
        "cases": len(rows),
        "verdicts": counted,
        "wrong": len(wrong),
        "false_alarms": len(healthy),
    }
    print(json.dumps(text, indent=1))
    for row in [*wrong, *healthy]:
        print("DISAGREES", json.dumps(row))
    if given.json:
        given.json.write_text(json.dumps({**text, "rows": rows}, indent=1) + "\n")
    return 1 if wrong or healthy else 0


def table(folder: Path, sums: dict[str, list[float]], every: int, worlds: list[int]) -> list[dict[str, Any]]:
    """A row for each case."""
    rows = []
    for world in worlds:
        cases = [(name, plan) for name in sums for plan in plans(name, world)][world % every :: every]
        # what fails on some ranks only comes last: it may leave the others waiting
        answers = real.load(world, [order for case in cases for order in orders(folder, *case)], folder)
        done = iter(answers)
        for name, plan in cases:
            # Adam's moments are those that were saved, or none where the optimizer was left out
            whole = [sums[name][0], sums[name][1] if plan.load == ALL and not plan.evaluation else 0.0]
            results = [real.loaded(next(done), whole) for _ in orders(folder, name, plan)]
            rows.append(row(folder, name, plan, results))
    return rows


def orders(folder: Path, name: str, plan: Plan) -> list[dict[str, Any]]:
    """The checkpoint as it is, and converted where that was possible."""
    kind = name.rstrip("0123-bfp6")
    order = {
        "kind": kind,
        "folder": str(folder / name),
        "stage": plan.stage,
        "dtype": plan.dtype,
        "load": ARGUMENTS[plan.load],
        "evaluation": plan.evaluation or (kind == "evaluation" and plan.evaluation is None),
    }
    if plan.tensor is not None:
        order["tensor"] = plan.tensor
    universal = plan.load == ALL and not plan.evaluation and (folder / name / f"{TAG}_universal").is_dir()
    return [{**order, "tag": TAG}, *([{**order, "universal": True}] if universal else [])]


def row(folder: Path, name: str, plan: Plan, results: list[bool]) -> dict[str, Any]:
    """The verdicts of both against what the ranks did."""
    seen = look(folder / name)
    judged = judge(seen, TAG, plan)
    converted = judge(seen, f"{TAG}_universal", plan) if len(results) > 1 else None
    assert judged.outcome is not None
    agreed = real.agrees(judged.outcome, results[0], results[1] if len(results) > 1 else None)
    if converted is not None and converted.outcome is not None and agreed:
        agreed = (converted.outcome.verdict is Verdict.LOADS) == results[1]
    unasked = {
        "checkpoint-needs-universal",
        "checkpoint-cannot-load",
        "checkpoint-load-not-known",
        "checkpoint-frozen-left-out",
        "checkpoint-universal-leaves",
        "checkpoint-optimizer-skipped",
        "checkpoint-weights-undone",
    }
    return {
        "saved": name, "world": plan.world, "stage": plan.stage, "dtype": plan.dtype, "tensor": plan.tensor, "load": plan.load,
        "evaluation": plan.evaluation,
        "verdict": judged.outcome.verdict.value, "loaded": results[0], "converted": (results[1:] or [None])[0],
        "agrees": agreed, "alarms": sorted({each.rule for each in judged.findings} - unasked),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
