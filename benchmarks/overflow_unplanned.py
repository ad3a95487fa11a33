"""Faults as users write them, in engines that the other tables use least: what does the watch say of each?

    python -m benchmarks.overflow_unplanned [--each 2] [--only "std of one,cast"] [--dtype fp16] [--part 1/2] [--json FILE] [--show]

From the repository's root. Where ``overflow_faults`` generates places for a few kinds, here every kind is another one: derivatives,
losses, checkpoints, experts, buffers, optimizers. Judged as there: a line may be left out, but not be another one.
"""

import argparse
import json
import platform
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.overflow.launch import conftest
from tests.overflow.launch.fault_cases import said_lines

ASKED = ("kind", "module", "line", "rank")
IN_MODULES = [
    "logsumexp of nothing",
    "std of one",
    "uninitialised memory",
    "cumulative sum",
    "zero vector by its norm",
    "mean of none",
    "rsqrt of a constant",
    "exp",
    "in place",
    "from numpy",
    "erfinv of one",
    "log of a drawn zero",
    "buffer grows",
    "reentrant checkpoint",
    "checkpoint",
    "einsum",
    "one of a list",
    "attention to nothing",
    "one expert",
    "running variance",
]
IN_GRADIENTS = [
    "function's backward",
    "sqrt of negatives unused",
    "sqrt of zero unused",
    "root of squares",
    "power of zeros",
    "acos of one",
    "hook of the user",
    "sqrt in a reentrant checkpoint",
    "sqrt in a checkpoint",
]
BETWEEN = ("cast", "softmax by hand")
IN_LOSSES = ("smoothed labels", "no class weight", "divergence", "cross entropy by hand")
IN_OPTIMIZERS = ("learning rate", "no epsilon")
KINDS = (*IN_MODULES, *IN_GRADIENTS, *BETWEEN, *IN_LOSSES, *IN_OPTIMIZERS)
ENGINES: tuple[dict[str, Any], ...] = (
    {"stage": 3, "dtype": "bf16", "offload": True},
    {"stage": 2, "dtype": "fp16"},
    {"stage": 2, "dtype": "fp32", "offload": True},
    {"stage": 3, "dtype": "fp16"},
    {"stage": 1, "dtype": "bf16"},
    {"stage": 3, "dtype": "fp32", "offload_param": True},
    {"stage": 0, "dtype": "fp32"},
)
INNER = {
    "attention to nothing": "middle.attention",
    "one expert": "middle.experts.2",
    "running variance": "middle.norm",
}
WORDS = {"attention to nothing": "# attention", "running variance": "# statistics"}
"""Which line is right where it is not the planted one."""


def cases_of(each: int, only: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """``each`` engines for every kind, on all ranks or on one."""
    cases = {}
    for number, kind in enumerate(KINDS):
        for turn in range(each) if not only or kind in only else ():
            rank = None if kind in IN_OPTIMIZERS else (None, 1, 0)[(number + turn) % 3]
            case = {"kind": kind, **ENGINES[(number + 3 * turn) % len(ENGINES)], "only": rank}
            cases[", ".join(f"{key} {value}" for key, value in case.items())] = case
    return cases


def part_of(cases: dict[str, dict[str, Any]], dtype: str | None, part: str) -> dict[str, dict[str, Any]]:
    """Those in one format, and of them every so many."""
    first, _, every = part.partition("/")
    kept = [name for name, case in cases.items() if dtype in (None, case["dtype"])]
    return {name: cases[name] for name in kept[int(first) - 1 :: int(every)]}


def judged(case: dict[str, Any], findings: list[dict[str, Any]]) -> dict[str, str]:
    """What is right, silent or wrong in the first finding."""
    told = [finding for finding in findings if finding["severity"] == "error"] or findings
    if not told:
        return {**dict.fromkeys(ASKED, "silent"), "said": ""}
    first = told[0]
    lines = said_lines(first)
    return {
        "kind": "right" if _is_rule(case["kind"], first["rule"]) else "wrong",
        "module": "right" if _is_module(case["kind"], first) else "wrong",
        "line": _line(case["kind"], lines),
        "rank": _rank(case["only"], first),
        "said": f"{first['title']}  [{first['rule']}] {lines}",
    }


def _is_rule(kind: str, rule: str) -> bool:
    if kind in IN_GRADIENTS:
        return rule == "gradient-stays-at-scale-one"
    if kind in IN_LOSSES:
        return rule == "loss-not-finite"
    if kind in BETWEEN:
        return rule == "overflow-between-modules"
    bad_state = kind in (*IN_OPTIMIZERS, "running variance")
    return rule in (("weight-not-finite",) if bad_state else ("overflow-in-module", "overflow-between-modules"))


def _is_module(kind: str, finding: dict[str, Any]) -> bool:
    affected = (finding["affects"] or ("",))[0]
    if kind in IN_LOSSES:
        return affected in ("", "the loss", "the model")
    if kind in BETWEEN:
        return affected in ("middle", "middle.inner", "the model")
    if kind in IN_OPTIMIZERS:
        return True
    if kind in IN_GRADIENTS:
        return "middle" in finding["title"] or affected.startswith("middle")
    return affected == INNER.get(kind, "middle")


def _line(kind: str, lines: list[str]) -> str:
    if not lines:
        return "right" if kind in IN_OPTIMIZERS else "silent"
    return "right" if all(WORDS.get(kind, "# planted") in line for line in lines) else "wrong"


def _rank(only: int | None, finding: dict[str, Any]) -> str:
    alone = re.search(r"rank (\d) of 2", " ".join((finding["title"], *finding["evidence"][:1])))
    if only is None:
        return "wrong" if alone else "right"
    return "right" if alone and int(alone[1]) == only else "wrong"


def is_right(row: dict[str, str]) -> bool:
    return all(row[asked] == "right" or (asked == "line" and row[asked] == "silent") for asked in ASKED)


def figures(cases: dict[str, dict[str, Any]], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and every case that is not right in full."""
    rows = {name: judged(case, ranks[0][name]["findings"]) for name, case in cases.items()}
    not_run = [name for name in cases if any(rank[name]["problem"] for rank in ranks)]
    return {
        "cases": len(cases),
        "kinds": len({case["kind"] for case in cases.values()}),
        "not_run": not_run,
        "right": sum(is_right(row) for name, row in rows.items() if name not in not_run),
        "wrong_line": sum(row["line"] == "wrong" for row in rows.values()),
        "findings_in_healthy_steps": sum(len(ranks[0][name]["healthy"]) for name in cases),
        **{asked: dict(Counter(row[asked] for row in rows.values())) for asked in ASKED},
        "not_right": {name: row for name, row in rows.items() if not is_right(row)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=2, help="engines for each kind")
    parser.add_argument("--only", default="", help="kinds, with commas between them")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="only the engines of this format")
    parser.add_argument("--part", default="1/1", help="the cases in parts: 2/3 is every third, from the second on")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", action="store_true", help="print all that was said")
    asked = parser.parse_args()
    cases = part_of(cases_of(asked.each, tuple(filter(None, asked.only.split(",")))), asked.dtype, asked.part)
    with tempfile.TemporaryDirectory() as folder:
        ranks = conftest.launch("unplanned_worker.py", cases, Path(folder), seconds=3600)
    for name in cases if asked.show else ():
        print(f"{name}\n    {ranks[0][name]['problem'] or ranks[0][name]['findings']}")
    told = figures(cases, ranks)
    print(json.dumps(told, indent=1))
    if asked.json:
        document = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), **told}
        asked.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
