"""Faults planted before, in and behind layers that hand values to other ranks, generated. Imports no torch."""

import itertools
import re
from typing import Any

STEP = 1
MODULES = {
    "experts": ("before", "moe.deepspeed_moe.experts.deepspeed_experts.0.plant", "after"),
    "norm": ("before", "after"),
    "tensor": ("llama.model.layers.1.mlp.act_fn.plant",),
}
WEIGHTS = {
    "experts": ("moe.deepspeed_moe.experts.deepspeed_experts.0.up",),
    "norm": ("up",),
    "tensor": ("llama.model.layers.1.mlp.up_proj",),
}
KINDS = {
    "overflow": ("overflow-in-module",),
    "zero": ("overflow-in-module",),
    "backward": ("gradient-stays-at-scale-one",),
    "weight": ("weight-not-finite",),
    "sum": ("overflow-in-module", "overflow-between-modules"),
}
"""``sum``: values that fit on each rank, and whose sum over the ranks does not."""
STAGES = {"experts": (0, 1, 2), "norm": (0, 2, 3), "tensor": (0, 1)}
DTYPES = ("fp32", "bf16", "fp16")


def everything() -> dict[str, dict[str, Any]]:
    """All cases by a name for people."""
    found = {}
    for parallel, kind, only, level in itertools.product(MODULES, KINDS, (0, 1, None), ("guard", "frames")):
        if kind == "sum" and (parallel != "norm" or only is not None):
            continue
        modules = {"weight": WEIGHTS[parallel], "sum": ("norm",)}.get(kind, MODULES[parallel])
        for number, module in enumerate(modules):
            stages = STAGES[parallel]
            stage = stages[(number + (only or 0) + len(kind)) % len(stages)]
            case = {
                "parallel": parallel,
                "kind": kind,
                "only": only,
                "level": level,
                "module": module,
                "stage": stage,
                "dtype": DTYPES[(number + len(level) + 2 * (only or 0) + len(kind)) % 3],
            }
            if kind == "weight" and stage == 3:
                case["stage"] = 0
            found[", ".join(map(str, case.values()))] = case
    return found


def judged(case: dict[str, Any], findings: list[dict[str, Any]]) -> dict[str, str]:
    """Whether kind, module, line and rank of what rank 0 found first are right, silent or wrong."""
    told = [finding for finding in findings if finding["severity"] == "error" and finding["rule"] != "bad-step-applied"]
    if not told:
        return dict.fromkeys(("kind", "module", "line", "rank"), "silent") | {"said": ""}
    first = told[0]
    cause = [line for line in first["evidence"] if not line.startswith("it reached rank")]
    lines = [line for text in (first["title"], *cause) for line in re.findall(r"[\w.]+\.py:\d+ in [^:]+: .*", text)]
    alone = re.search(r"on rank (\d) of 2", first["title"])
    every = "on all 2 ranks" in first["title"]
    part = re.search(r"that rank (\d) of 2 holds", first["title"])
    right_rank = every if case["only"] is None else bool(alone) and int(alone[1]) == case["only"]
    if part is not None:
        right_rank = case["kind"] == "weight" and case["only"] == int(part[1])
    wanted = "all_reduce(" if case["kind"] == "sum" else "# planted"
    return {
        "kind": "right" if first["rule"] in KINDS[case["kind"]] else "wrong",
        "module": "right" if case["module"] in first["title"] else "wrong",
        "line": ("right" if case["kind"] == "weight" else "silent")
        if not lines
        else "right"
        if all(wanted in line for line in lines) and case["kind"] != "weight"
        else "wrong",
        "rank": "right" if right_rank else "wrong",
        "said": f"{first['title']}  [{first['rule']}]",
    }
