"""Predicted against measured memory: ``python benchmarks/memory.py [--json FILE] [--only PART]...``.

Gloo ranks go through all cases, DeepSpeed imported once: seven architectures with random weights x ZeRO stages 0 to 3 x
offload x bf16 and fp32 x two bucket sizes on two ranks; and fp16, one and four ranks, accumulation and activation
checkpointing, one at a time and together. At each point the live storages of each rank are counted
(``dsdoctor.memory.engine``) and held against what ``dsdoctor.memory`` says for that rank, and what DeepSpeed's own estimators
say. The accelerator is the CPU, so device and host are one memory and are compared together. Needs torch, transformers and
DeepSpeed; nothing is downloaded.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memory_cases import BATCH, SEQUENCE, Case, all_cases, varied_cases
from memory_ranks import launch, script

from dsdoctor.memory.models import Layout, ModelShape, Point, Run, ZeroSettings, parse_model
from dsdoctor.memory.predict import predict

CLOSE = 0.05
LARGE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def shapes_of(folder: Path, cases: list[Case]) -> dict[tuple[str, str, bool], ModelShape]:
    """What the script of ``dsdoctor memory`` says of each model; run in this process, for torch is imported once."""
    child = script("ask_model")
    shapes = {}
    for architecture, dtype, how in sorted({(case.architecture, case.dtype, case.checkpointing) for case in cases}):
        wish = {"model": str(folder / f"{architecture}.json"), "dtype": dtype, "runs": [[BATCH, SEQUENCE, how]]}
        shapes[architecture, dtype, how] = parse_model(child.answer(wish))
    return shapes


def run_of(shape: ModelShape) -> Run:
    """The run as a CPU does it: its attention with dropout makes all scores."""
    first = shape.runs[0]
    return shape.run_like(first, materialized=True) or first


def estimated(case: Case, shape: ModelShape) -> dict[str, float]:
    """What DeepSpeed's own estimators say for this rank, in bytes; stages 0 and 1 have none."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    offload = case.offload != "none"
    if case.stage == 2:
        cpu, gpu = estimate_zero2_model_states_mem_needs(shape.elements, case.world, 1, offload, 1.0)
    elif case.stage == 3:
        largest = max(sum(shape.parameters[n][1] for n in module.parameters) for module in shape.modules)
        both = case.offload == "both"
        cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
            shape.elements, largest, case.world, 1, offload, both, True, 1.0
        )
    else:
        return {}
    return {"device": gpu, "host": cpu / case.world}


def rows(cases: list[Case], folder: Path, measured: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    shapes = shapes_of(folder, cases)
    settings_of = script("ask_zero_config")
    for number, case in enumerate(cases):
        file = folder / "ds_config.json"
        file.write_text(json.dumps(case.configuration()))
        effective = settings_of.answer(str(file), {"world": case.world, "batch": None, "given": {}})
        settings = ZeroSettings(**{**effective, "automatic": tuple(effective["automatic"])})
        shape = shapes[case.architecture, case.dtype, case.checkpointing]
        if shape.runs[0].error:
            print(f"{case.name}: {shape.runs[0].error}", file=sys.stderr)
        for rank in range(case.world):
            ledger = predict(settings, shape, run_of(shape), Layout(world=case.world, rank=rank, together=True))
            points = {}
            told = {moment.point.value for moment in ledger.moments}
            for point, size in measured[number][rank]["measured"].items():
                if point not in told:
                    continue
                said = ledger.at(Point(point)).device
                points[point] = {"measured": size, "predicted": said, "error": said / size - 1}
            yield {
                **asdict(case),
                "rank": rank,
                "points": points,
                "estimators": estimated(case, shape),
                "worst": max(abs(each["error"]) for each in points.values()),
            }


def large_model(folder: Path) -> dict[str, Any]:
    """What a ledger of Llama-3-70B's shape takes on this machine."""
    (folder / "large.json").write_text(json.dumps(LARGE))
    zero = {"stage": 3, "reduce_bucket_size": 50_000_000}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    (folder / "large_ds.json").write_text(json.dumps(config))
    argv = [sys.executable, "-m", "dsdoctor", "memory", "--config", str(folder / "large_ds.json"), "--json"]
    argv += [
        "--model",
        str(folder / "large.json"),
        "--gpus",
        "64x80G",
        "--batch",
        "1",
        "--sequence",
        "4096",
        "--checkpointing",
    ]
    started = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    told = json.loads(done.stdout)
    return {
        "seconds": seconds,
        "largest process": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "parameters": told["model"]["parameters"],
        "prediction": told["prediction"],
    }


def summary(table: list[dict[str, Any]]) -> dict[str, Any]:
    errors = {}
    for point in Point:
        found = sorted(abs(row["points"][point.value]["error"]) for row in table if point.value in row["points"])
        if found:
            close = sum(error <= CLOSE for error in found)
            errors[point.value] = {
                "n": len(found),
                "within 5 %": close,
                "median": found[len(found) // 2],
                "worst": found[-1],
            }
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", action="append", default=[], help="cases whose name holds all of these")
    parser.add_argument("--every", type=int, default=1, help="each N-th case")
    parser.add_argument(
        "--varied", action="store_true", help="the variations alone: fp16, other ranks, accumulation ..."
    )
    parser.add_argument("--more", action="store_true", help="also a model of 70 B parameters")
    parser.add_argument("--again", action="store_true", help="measure cases that are off once more; the lesser counts")
    parser.add_argument("--keep", type=Path, help="a folder for the measurements; those that are there are used")
    given = parser.parse_args()
    chosen = varied_cases() if given.varied else all_cases()
    cases = [case for case in chosen if all(part in f"{case.name} " for part in given.only)][:: given.every]
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(exist_ok=True, parents=True)
        measured = measured_in(folder, cases)
        table = list(rows(cases, folder, measured))
        far = sorted({cases.index(case_of(row)) for row in table if row["worst"] > CLOSE})
        if far and given.again:
            measure_again(folder, cases, far, measured)
            table = list(rows(cases, folder, measured))
        more = {"large": large_model(folder)} if given.more else {}
    show(table)
    if given.json:
        whole = {**versions(), "cases": len(cases), "summary": summary(table), **more, "rows": table}
        given.json.write_text(json.dumps(whole, indent=1) + "\n")


def measured_in(folder: Path, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """What each rank of each case measured: of an earlier call with the same cases, where that is in the folder."""
    kept = folder / "measured.json"
    names = [case.name for case in cases]
    if kept.exists() and (before := json.loads(kept.read_text()))["cases"] == names:
        return before["measured"]
    measured = launch(cases, folder)
    kept.write_text(json.dumps({"cases": names, "measured": measured}))
    return measured


def measure_again(folder: Path, cases: list[Case], far: list[int], measured: list[list[dict[str, Any]]]) -> None:
    """The lesser of two measurements for the cases at ``far``; changes ``measured``.

    What a thread of gloo's lets go late (``memory_ranks.LET_GO``) is counted within a step too: it may measure 50 to 750 kB
    more than the training needs, and never less.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for number, ranks in zip(far, launch([cases[number] for number in far], Path(temporary)), strict=True):
            for first, second in zip(measured[number], ranks, strict=True):
                for point, size in second["measured"].items():
                    first["measured"][point] = min(first["measured"][point], size)


def case_of(row: dict[str, Any]) -> Case:
    return Case(**{name: row[name] for name in Case.__dataclass_fields__})


def show(table: list[dict[str, Any]]) -> None:
    """A line for each case and rank, one for each point that is off, and the summary."""
    for row in table:
        print(f"{row['worst']:7.1%}", case_of(row).name, "rank", row["rank"])
        for point, each in row["points"].items():
            if abs(each["error"]) > CLOSE:
                figures = f"measured {each['measured']:>9} predicted {each['predicted']:>9} {each['error']:+.1%}"
                print(f"{'':8}{point:18} {figures}")
    print(json.dumps(summary(table), indent=1))


def versions() -> dict[str, str]:
    """What the figures hold for."""
    import deepspeed
    import torch
    import transformers

    modules = {"torch": torch, "deepspeed": deepspeed, "transformers": transformers}
    return {"python": platform.python_version(), **{name: module.__version__ for name, module in modules.items()}}


if __name__ == "__main__":
    main()
