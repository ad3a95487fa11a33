"""Predicted against measured memory: ``python benchmarks/memory.py [--json FILE] [--only PART]...``.

Two gloo ranks go through all cases, DeepSpeed imported once: five architectures with random weights x ZeRO stages 0 to 3 x
offload x bf16 and fp32 x two bucket sizes. At each point the live storages of both ranks are counted
(``dsdoctor.memory.live``) and held against what ``dsdoctor.memory`` says for that rank, and what DeepSpeed's own estimators
say. The accelerator is the CPU, so device and host are one memory and are compared together. Needs torch, transformers and
DeepSpeed; nothing is downloaded.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import logging
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsdoctor.core.host import CHILD_SCRIPTS
from dsdoctor.memory.models import Layout, ModelShape, Point, ZeroSettings
from dsdoctor.memory.predict import predict
from dsdoctor.memory.read import parse_model

WORLD, BATCH, SEQUENCE = 2, 2, 32
BUCKETS = (20_000, 1_000_000)
CLOSE = 0.05
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "GPT-2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 3,
        "n_embd": 64,
        "n_head": 2,
        "vocab_size": 503,
        "n_positions": 48,
    },
    "Llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 503,
    },
    "T5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 64,
        "d_ff": 130,
        "d_kv": 16,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 503,
        "decoder_start_token_id": 0,
    },
    "Mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 503,
    },
    "ViT": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 64,
        "intermediate_size": 130,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    },
}
PARTS = (
    (Point.FIRST_FORWARD, Point.FIRST_BACKWARD, Point.FIRST_STEP),
    (Point.FORWARD, Point.BACKWARD, Point.STEP),
)
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
OFFLOADS = {0: ("none",), 1: ("none", "optimizer"), 2: ("none", "optimizer"), 3: ("none", "optimizer", "both")}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training of two steps."""

    architecture: str
    stage: int
    offload: str
    dtype: str
    bucket: int

    @property
    def name(self) -> str:
        return f"{self.architecture} stage {self.stage} offload {self.offload} {self.dtype} bucket {self.bucket}"

    def configuration(self) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": self.bucket,
            "allgather_bucket_size": self.bucket,
        }
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload == "both":
            zero["offload_param"] = {"device": "cpu"}
        if self.stage == 3:
            # the larger bucket comes with DeepSpeed's default of reuse, which keeps all of a small model gathered
            small = self.bucket == BUCKETS[0]
            zero |= {"stage3_param_persistence_threshold": 500, "stage3_prefetch_bucket_size": self.bucket}
            zero |= {"stage3_max_reuse_distance": 10_000} if small else {}
        return {
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": zero,
            "bf16": {"enabled": self.dtype == "bfloat16"},
            "zero_force_ds_cpu_optimizer": False,
        }


def all_cases() -> Iterator[Case]:
    for architecture in ARCHITECTURES:
        for stage, offloads in OFFLOADS.items():
            for offload in offloads:
                for dtype in ("bfloat16", "float32"):
                    for bucket in BUCKETS:
                        yield Case(architecture=architecture, stage=stage, offload=offload, dtype=dtype, bucket=bucket)


# -- in a rank


def measure(case: Case, folder: Path) -> dict[str, int]:
    """Bytes of live storages at each point of two real steps."""
    import deepspeed
    import torch

    from dsdoctor.memory.live import LiveStorages

    child = script("ask_model")
    torch.manual_seed(0)
    live = LiveStorages()
    live.start(existing=False)
    try:
        model, config, _ = child.build({"model": str(folder / f"{case.architecture}.json"), "dtype": "float32"})
        engine, *_ = deepspeed.initialize(model=model, config=case.configuration())
        del model
        measured = {Point.AFTER_INITIALIZE: now(live)}
        for forward, backward, step in PARTS:
            inputs = child.inputs_of(engine.module, config, BATCH, SEQUENCE)
            now(live)
            loss = engine(**inputs)["loss"]
            measured[forward] = most(live)
            engine.backward(loss)
            del loss
            measured[backward] = most(live)
            engine.step()
            measured[step] = most(live)
            measured.setdefault(Point.AFTER_STEP, now(live))
        engine.save_checkpoint(str(folder / "checkpoint"))
        measured[Point.SAVE] = most(live)
    finally:
        live.stop()
    engine.destroy()
    return {point.value: size for point, size in measured.items()}


def now(live: Any) -> int:
    gc.collect()
    live.mark()
    return sum(size for device, size in live.now.items() if device != "meta")


def most(live: Any) -> int:
    return sum(size for device, size in live.mark().items() if device != "meta")


def run_rank(plan: Path) -> None:
    """Measure every case of the plan; the answers go beside it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch
    from deepspeed.utils import logger

    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")
    results = []
    for number, fields in enumerate(json.loads(plan.read_text())):
        case = Case(**fields)
        started = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            measured = measure(case, plan.parent)
        results.append({"measured": measured, "seconds": time.monotonic() - started})
        if os.environ["RANK"] == "0":
            print(f"{number} {case.name} {results[-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
        plan.with_name(f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


# -- the table


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, CHILD_SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(cases: list[Case], folder: Path) -> list[list[dict[str, Any]]]:
    """Both ranks, through all cases."""
    for name, fields in ARCHITECTURES.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    plan = folder / "plan.json"
    plan.write_text(json.dumps([asdict(case) for case in cases]))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29671")}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(plan)],
            env={
                **os.environ,
                **address,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "LOCAL_SIZE": str(WORLD),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parents[1]),
            },
        )
        for rank in range(WORLD)
    ]
    for rank in ranks:
        if rank.wait():
            raise SystemExit(f"a rank ended with status {rank.returncode}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]


def shapes_of(folder: Path, cases: list[Case]) -> dict[tuple[str, str], ModelShape]:
    """What the script of ``dsdoctor memory`` says of each model; run in this process, for torch is imported once."""
    child = script("ask_model")
    shapes = {}
    for architecture, dtype in sorted({(case.architecture, case.dtype) for case in cases}):
        wish = {"model": str(folder / f"{architecture}.json"), "dtype": dtype, "runs": [[BATCH, SEQUENCE, False]]}
        shapes[architecture, dtype] = parse_model(child.answer(wish))
    return shapes


def estimated(case: Case, shape: ModelShape) -> dict[str, float]:
    """What DeepSpeed's own estimators say for this rank, in bytes; stages 0 and 1 have none."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    offload = case.offload != "none"
    if case.stage == 2:
        cpu, gpu = estimate_zero2_model_states_mem_needs(shape.elements, WORLD, 1, offload, 1.0)
    elif case.stage == 3:
        largest = max(sum(shape.parameters[n][1] for n in module.parameters) for module in shape.modules)
        both = case.offload == "both"
        cpu, gpu, _ = estimate_zero3_model_states_mem_needs(shape.elements, largest, WORLD, 1, offload, both, True, 1.0)
    else:
        return {}
    return {"device": gpu, "host": cpu / WORLD}


def rows(cases: list[Case], folder: Path, measured: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    shapes = shapes_of(folder, cases)
    settings_of = script("ask_zero_config")
    for number, case in enumerate(cases):
        file = folder / "ds_config.json"
        file.write_text(json.dumps(case.configuration()))
        effective = settings_of.answer(str(file), {"world": WORLD, "batch": None, "given": {}})
        settings = ZeroSettings(**{**effective, "automatic": tuple(effective["automatic"])})
        shape = shapes[case.architecture, case.dtype]
        if shape.runs[0].error:
            print(f"{case.name}: {shape.runs[0].error}", file=sys.stderr)
        for rank in range(WORLD):
            ledger = predict(settings, shape, shape.runs[0], Layout(world=WORLD, rank=rank, together=True))
            points = {}
            told = {moment.point.value for moment in ledger.moments}
            for point, size in measured[rank][number]["measured"].items():
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
    parser.add_argument("--more", action="store_true", help="also a model of 70 B parameters")
    parser.add_argument("--again", action="store_true", help="measure cases that are off once more; the lesser counts")
    parser.add_argument("--keep", type=Path, help="a folder for the measurements; those that are there are used")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        run_rank(given.rank)
        return
    cases = [case for case in all_cases() if all(part in f"{case.name} " for part in given.only)][:: given.every]
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


def measured_in(folder: Path, cases: list[Case]) -> list[Any]:
    """What each rank measured: of an earlier call with the same cases, where that is in the folder."""
    plan = folder / "plan.json"
    same = plan.exists() and json.loads(plan.read_text()) == [asdict(case) for case in cases]
    if same and (folder / f"rank{WORLD - 1}.json").exists():
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]
    return launch(cases, folder)


def measure_again(folder: Path, cases: list[Case], far: list[int], measured: list[list[dict[str, Any]]]) -> None:
    """The lesser of two measurements for the cases at ``far``; changes ``measured``.

    A thread of gloo's lets go of a collective's tensors a moment after ``wait()`` returned. On a busy machine that moment
    reaches into the next point, which then measures more than the training needs: seen as 50 to 280 kB. It never measures less.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for rank, second in enumerate(launch([cases[number] for number in far], Path(temporary))):
            for number, result in zip(far, second, strict=True):
                first = measured[rank][number]["measured"]
                measured[rank][number]["measured"] = {
                    point: min(first[point], result["measured"][point]) for point in first
                }


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
