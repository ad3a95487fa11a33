"""Planted overflows, generated: architecture x attention x padding x ZeRO stage x dtype x kind x rank x micro-batch.

What each case must be told as, and how a verdict is judged. Imports no torch.
"""

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

ARCHITECTURES = ("gpt2", "llama", "t5", "mixtral", "vit", "all_to_all", "all_reduce")
"""The last two hand activations to the other rank, as experts and tensor parallel layers do."""
ATTENTIONS = ("sdpa", "eager")
"""Flex attention has no backward on a CPU (torch 2.13), so there it does not train."""
PADDINGS = ("none", "left", "right")
STAGES = (0, 1, 2, 3)
DTYPES = ("fp32", "bf16", "fp16")
STEP = 1
"""The step in which the fault is planted; those before it are healthy."""

TARGETS = {
    "gpt2": ("transformer.h.1.attn.c_proj", "torch.addmm("),
    "llama": ("model.layers.1.self_attn.o_proj", "self.o_proj("),
    "t5": ("encoder.block.1.layer.0.SelfAttention.o", "self.o("),
    "mixtral": ("model.layers.1.self_attn.o_proj", "self.o_proj("),
    "vit": ("vit.layers.1.attention.o_proj", "self.o_proj("),
    "all_to_all": ("inner.first", "self.first("),
    "all_reduce": ("inner.first", "self.first("),
    "all_batch_norm": ("inner.first", "self.first("),
}
"""The module that is planted in, and the words of the line that calls its operation."""

KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "weight": (("weight-not-finite",), ""),
    "range": (("overflow-in-module",), "target"),
    "output": (("overflow-in-module",), "planted"),
    "zero by zero": (("overflow-in-module",), "planted"),
    "between": (("overflow-between-modules",), "planted"),
    "backward": (("gradient-stays-at-scale-one",), "planted"),
    "data": (("nan-in-the-batch",), ""),
    "loss inside": (("loss-not-finite",), "cross_entropy"),
    "loss outside": (("loss-not-finite",), "planted"),
    "log outside": (("loss-not-finite",), "planted"),
    "underflow": (("gradients-underflow",), ""),
    "small updates": (("updates-too-small",), ""),
    "flushed": (("activations-underflow",), ""),
}
"""The rules that are right for a kind, and which line is: of the target, the planted one, or one with these words."""


def is_possible(case: dict[str, Any]) -> bool:
    """Whether such a run exists."""
    if case["architecture"] == "vit" and (case["padding"] != "none" or case["kind"] == "loss inside"):
        return False
    if case["architecture"].startswith("all_") and (
        case["padding"] != "none" or case["attention"] != "sdpa" or case["kind"] == "data"
    ):
        return False
    if case["kind"] in ("underflow", "small updates"):
        # of all ranks and micro-batches; weights in bfloat16 alone are for DeepSpeed those of a run without ZeRO
        dtype, stages = ("fp16", (1, 2, 3)) if case["kind"] == "underflow" else ("bf16", (0,))
        return case["only"] is None and case["micro"] == 0 and case["dtype"] == dtype and case["stage"] in stages
    if case["kind"] == "flushed":
        # in all batches: what is nothing in one of them leaves the sum of their gradients as it is
        return case["dtype"] == "fp16" and case["only"] is None and case["micro"] == 0
    if case["architecture"] == "t5" and case["kind"] == "data":
        return False
    return not (case["kind"] == "weight" and (case["micro"] == 1 or (case["stage"] == 3 and case["only"] is None)))


def everything() -> Iterator[dict[str, Any]]:
    """All cases, a name in each."""
    for architecture, attention, padding, stage, dtype, kind, only, micro in itertools.product(
        ARCHITECTURES, ATTENTIONS, PADDINGS, STAGES, DTYPES, KINDS, (None, 0, 1), (0, 1)
    ):
        case = {
            "architecture": architecture,
            "attention": attention,
            "padding": padding,
            "stage": stage,
            "dtype": dtype,
            "kind": kind,
            "only": only,
            "micro": micro,
        }
        if is_possible(case):
            yield case


def on_a_gpu() -> dict[str, dict[str, Any]]:
    """What torch trains on GPUs alone: a real SyncBatchNorm behind the fault (on a CPU ``parallel_cases`` has its like), and
    padded batches under flex attention."""
    layers = (
        ("all_batch_norm", "sdpa", "none"),
        ("llama", "flex_attention", "left"),
        ("mixtral", "flex_attention", "right"),
    )
    cases = [
        {
            "architecture": architecture,
            "attention": attention,
            "padding": padding,
            "stage": stage,
            "dtype": "bf16",
            "kind": kind,
            "only": only,
            "micro": 1,
        }
        for (architecture, attention, padding), stage, kind, only in itertools.product(
            layers, (1, 3), ("output", "zero by zero"), (None, 1)
        )
    ]
    return {name_of(case): case for case in cases}


def name_of(case: dict[str, Any]) -> str:
    """A name for people."""
    return ", ".join(
        f"{key} {value}" if key in ("stage", "only", "micro") else str(value) for key, value in case.items()
    )


def sample(count: int, seed: int) -> dict[str, dict[str, Any]]:
    """``count`` cases in which each architecture, kind and stage comes about equally often."""
    by_cell: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in everything():
        by_cell.setdefault((case["kind"], case["architecture"], case["stage"]), []).append(case)
    chance = random.Random(seed)
    cells = list(by_cell.values())
    chance.shuffle(cells)
    chosen = [chance.choice(cells[number % len(cells)]) for number in range(count)]
    return {name_of(case): case for case in chosen}


def healthy(steps: int) -> dict[str, dict[str, Any]]:
    """Twelve configurations in which nothing is wrong: each architecture, stage, dtype and level among them."""
    names = [*ARCHITECTURES, *ARCHITECTURES[:5]]
    cases = [
        {
            "kind": "healthy",
            "architecture": architecture,
            "attention": ATTENTIONS[number % 2],
            "padding": "none" if architecture in ("vit", "all_to_all", "all_reduce") else PADDINGS[number % 3],
            "stage": (1, 2, 3, 0)[number % 4],
            "dtype": DTYPES[(number + number // 4) % 3],
            "level": ("guard", "frames")[number // 6],
            "optimizer": ("adamw", "sgd")[number % 2],
            "steps": steps,
            "only": None,
            "micro": 0,
        }
        for number, architecture in enumerate(names)
    ]
    return {", ".join(str(value) for value in case.values()): case for case in cases}


# -- judging


def said_lines(finding: dict[str, Any]) -> list[str]:
    """The lines of code that a finding names."""
    # by which line it reached another rank is no cause
    texts = [finding["title"], *(line for line in finding["evidence"] if not line.startswith("it reached rank"))]
    found = [match for text in texts for match in re.findall(r"[\w.]+\.py:\d+ in [^:]+: .*", text)]
    return [line for line in found if line]


def judged(case: dict[str, Any], findings: list[dict[str, Any]]) -> dict[str, str]:
    """What is right, silent or wrong of kind, module, line, rank, and what was said."""
    told = [finding for finding in findings if finding["severity"] == "error"] or findings
    if not told:
        return {"kind": "silent", "module": "silent", "line": "silent", "rank": "silent", "said": ""}
    first = told[0]
    rules, line = KINDS[case["kind"]]
    return {
        "kind": "right" if first["rule"] in rules else "wrong",
        "module": _module(case, first),
        "line": _line(case, first, line),
        "rank": _rank(case, first),
        "said": f"{first['title']}  [{first['rule']}] {said_lines(first)}",
    }


def _module(case: dict[str, Any], finding: dict[str, Any]) -> str:
    target = TARGETS[case["architecture"]][0]
    affected = finding["affects"]
    if case["kind"] in ("loss inside", "loss outside", "log outside"):
        return "right" if not affected or affected[0] in ("the loss", "the model") else "wrong"
    if case["architecture"].startswith("all_") and (
        case["padding"] != "none" or case["attention"] != "sdpa" or case["kind"] == "data"
    ):
        return False
    if case["kind"] in ("underflow", "small updates"):
        return "right" if affected and affected[0] in " ".join(finding["evidence"]) else "wrong"
    if case["kind"] == "data":
        return "right" if affected and affected[0] == "the model" else "wrong"
    if case["kind"] == "backward":
        # the gradient of what the module was given
        return "right" if target.rpartition(".")[0] in finding["title"] or target in finding["title"] else "wrong"
    if case["kind"] == "between":
        return "right" if affected and affected[0].startswith(target.rpartition(".")[0]) else "wrong"
    return "right" if affected and affected[0] == target else "wrong"


def _line(case: dict[str, Any], finding: dict[str, Any], wanted: str) -> str:
    lines = said_lines(finding)
    if not wanted:
        return "wrong" if lines else "right"
    words = {"planted": "# planted", "target": TARGETS[case["architecture"]][1]}.get(wanted, wanted)
    if not lines:
        return "silent"
    return "right" if all(words in line for line in lines) else "wrong"


def _rank(case: dict[str, Any], finding: dict[str, Any]) -> str:
    only = case["only"]
    title = " ".join((finding["title"], *finding["evidence"][:1]))
    alone = re.search(r"rank (\d) of 2", title)
    if only is None:
        return "wrong" if alone else "right"
    return "right" if alone and int(alone[1]) == only else "wrong"
