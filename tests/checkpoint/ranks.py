"""One of the ranks that make real checkpoints of every kind, or load them into other engines; all in one process a rank.

``ranks.py make OUT [KIND ...]``, ``ranks.py make-two OUT OTHER [KIND ...]`` and ``ranks.py load ORDERS.json ANSWERS.json``, started
once a rank with RANK and WORLD_SIZE. The kinds are generated: stage x dtype, and what else DeepSpeed can train. Knows nothing of
dsdoctor.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import deepspeed
import torch
from deepspeed import comm
from torch import nn

WIDTH = 6
SEED = int(os.environ.get("SEED", "1"))
EVERY_STEP = "EVERY_STEP" in os.environ
"""Both steps of each kind are saved, else those of stage 1 only."""


class Model(nn.Module):
    """A buffer, a layer that is frozen, two names of one parameter, a parameter whose size no number of ranks divides."""

    def __init__(self, *, frozen=False, experts=False):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = nn.Linear(WIDTH, 7)
        self.second = nn.Linear(7, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("seen", torch.tensor(5, dtype=torch.int64))
        if frozen:
            self.first.requires_grad_(False)
        self.experts = None
        if experts:
            from deepspeed.moe.layer import MoE

            self.experts = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2, k=1, min_capacity=0)

    def forward(self, x):
        x = self.second(torch.relu(self.first(self.embed(x))))
        if self.experts is not None:
            x = self.experts(x)[0]
        return self.head(x).float().pow(2).mean()


def configured(stage, dtype, *, universal=False, optimizer=True):
    made = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1000000,
        # from the first step on the fp32 weights are no numbers of bf16 any more
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-2, "warmup_max_lr": 2e-2, "warmup_num_steps": 10},
        },
    }
    if universal:
        made["checkpoint"] = {"load_universal": True}
    if dtype != "fp32":
        made[dtype] = {"enabled": True}
    if not optimizer:
        del made["optimizer"], made["scheduler"]
    return made


def evaluating(stage, dtype, *, seed=1, universal=False):
    """An engine without an optimizer."""
    torch.manual_seed(seed)
    return deepspeed.initialize(model=Model(), config=configured(stage, dtype, universal=universal, optimizer=False))[0]


def engine_of(stage, dtype, *, seed=1, universal=False, **kinds):
    torch.manual_seed(seed)
    model = Model(**kinds)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kinds.get("experts"):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

        parameters = split({"params": parameters, "name": "all"})
    made = configured(stage, dtype, universal=universal)
    return deepspeed.initialize(model=model, model_parameters=parameters, config=made)[0]


def step(engine):
    dtype = next(p.dtype for p in engine.module.parameters())
    loss = engine(torch.randn(2, WIDTH).to(dtype))
    engine.backward(loss)
    engine.step()


def pipeline_of(stage, dtype, *, seed=1, universal=False):
    from deepspeed.pipe import LayerSpec, PipelineModule

    torch.manual_seed(seed)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss())
    made = {**configured(stage, dtype, universal=universal), "gradient_accumulation_steps": 2}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=made)[0]


def tensors_of(stage, dtype, *, seed=1, universal=False, tensor=2):
    """A Llama whose tensors DeepSpeed cuts up over ranks (AutoTP)."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
            vocab_size=32,
        )
    )  # fmt: skip
    made = {**configured(stage, dtype, universal=universal), "tensor_parallel": {"autotp_size": tensor}}
    if dtype == "bf16":
        model = model.bfloat16()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=made)[0]


def kinds():
    """Name -> how its engine is made: (function, stage, dtype, what is special)."""
    for stage in (0, 1, 2, 3):
        for dtype in ("fp32", "bf16"):
            yield f"zero{stage}-{dtype}", (engine_of, stage, dtype, {})
    # the one that DeepSpeed saves without an optimizer
    yield "evaluation0-fp32", (evaluating, 0, "fp32", {})
    for stage in (1, 2, 3):
        yield f"frozen{stage}-fp32", (engine_of, stage, "fp32", {"frozen": True})
    for stage in (0, 1, 2):
        yield f"experts{stage}-bf16", (engine_of, stage, "bf16", {"experts": True})
    for stage in (0, 1):
        for dtype in ("fp32", "bf16"):
            yield f"pipeline{stage}-{dtype}", (pipeline_of, stage, dtype, {})
    for stage in (0, 1, 2):
        for dtype in ("fp32", "bf16"):
            yield f"tensors{stage}-{dtype}", (tensors_of, stage, dtype, {})


def excluded():
    """As kinds, of which none is made that is not named: saved without the frozen parameters."""
    for stage in (0, 1, 2, 3):
        yield f"excluded{stage}-fp32", (engine_of, stage, "fp32", {"frozen": True})


def train(engine):
    if engine.optimizer is None:
        # nothing is trained; the tags of a script that evaluates are counted all the same
        engine.global_steps += 1
        return
    dtype = next(p.dtype for p in engine.module.parameters())
    if hasattr(engine, "num_stages"):
        batches = iter([(torch.randn(2, WIDTH).to(dtype), torch.zeros(2, WIDTH).to(dtype)) for _ in range(2)])
        engine.train_batch(batches)
    elif hasattr(engine.module, "config"):
        ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(engine.global_steps))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    else:
        engine.backward(engine(torch.randn(2, WIDTH).to(dtype)))
        engine.step()


def held(engine):
    """What an engine holds, as two sums over all ranks that tell another state apart: weights, Adam's first moments."""
    if hasattr(engine.module, "config"):
        # cut tensors have other sums on each rank; what the whole model makes of a batch is the same, however it is cut
        ids = torch.arange(16).view(2, 8)
        with torch.no_grad():
            return [float(engine(input_ids=ids, labels=ids).loss), 0.0]
    weights = torch.zeros((), dtype=torch.float64)
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            weights += parameter.detach().double().abs().sum()
    inner = engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    moments = [state["exp_avg"] for state in getattr(inner, "state", {}).values() if "exp_avg" in state]
    moment = torch.stack(
        [each.detach().double().abs().sum() for each in moments] or [torch.zeros(1).double().sum()]
    ).sum()
    comm.all_reduce(weights)
    comm.all_reduce(moment)
    if not engine.zero_optimization():
        # without ZeRO each data-parallel rank has all of them
        moment /= engine.dp_world_size
    return [float(weights) / comm.get_world_size(), float(moment)]


def no_grid():
    """A pipeline leaves its grid behind, which engines after it would take for theirs."""
    deepspeed.utils.groups.mpu = None


def make(out, wanted, seed=SEED, *, convert=True):
    out.mkdir(parents=True, exist_ok=True)
    sums, failed = {}, {}
    for name, (function, stage, dtype, special) in (*kinds(), *(each for each in excluded() if each[0] in wanted)):
        if wanted and name not in wanted:
            continue
        no_grid()
        engine = function(stage, dtype, seed=seed, **special)
        for number in (1, 2):
            train(engine)
            if number == 2 or name.startswith("zero1") or EVERY_STEP:
                engine.save_checkpoint(str(out / name), exclude_frozen_parameters=name.startswith("excluded"))
        sums[name] = held(engine)
        engine.destroy()
    if os.environ["RANK"] == "0":
        for name in converted(sums) if convert else ():
            failed.update(make_universal(out, name))
        (out / "sums.json").write_text(json.dumps(sums))
        (out / "failed.json").write_text(json.dumps(failed))
    comm.barrier()


def converted(names):
    """Those of which a universal checkpoint is made: what DeepSpeed's converter takes, or what UNIVERSAL names of it."""
    wanted = os.environ.get("UNIVERSAL")
    able = [
        each for each in names if each.startswith(("zero", "pipeline", "tensors")) and each.partition("-")[0][-1] != "0"
    ]
    return able if wanted is None else [each for each in names if each in wanted.split()]


def make_universal(out, name):
    """DeepSpeed's converter, in this process: {} or what went wrong."""
    from deepspeed.checkpoint import ds_to_universal

    folder = out / name / "global_step2"
    sys.argv = ["ds_to_universal", "--input_folder", str(folder), "--output_folder", f"{folder}_universal",
                "--num_extract_workers", "1", "--num_merge_workers", "1"]  # fmt: skip
    if "3" not in name.partition("-")[0] and not name.startswith("tensors"):
        sys.argv.append("--inject_missing_state")
    try:
        ds_to_universal.main(ds_to_universal.parse_arguments())
    except BaseException:
        return {f"{name} universal": traceback.format_exc()[-2000:]}
    return {}


def hugging_face(out, config):
    """A checkpoint of each stage of a model that transformers makes."""
    import transformers

    kind = transformers.AutoConfig.from_pretrained(config)
    for stage in (1, 2, 3):
        torch.manual_seed(SEED)
        model = transformers.AutoModelForCausalLM.from_config(kind)
        engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=configured(stage, "fp32")
        )[0]
        ids = torch.randint(0, kind.vocab_size, (2, 8))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.save_checkpoint(str(out / f"stage{stage}"))
        engine.destroy()


def fill(out):
    """Save again and again until a disk is full; what each save became."""
    engine, told = engine_of(2, "bf16"), []
    for _ in range(40):
        train(engine)
        try:
            engine.save_checkpoint(str(out))
            told.append("saved")
        except BaseException as error:
            told.append(f"{type(error).__name__}: {error}"[:200])
            break
    print("FILLED", json.dumps(told), file=sys.stderr, flush=True)


def load(orders, answers):
    """Each order: folder, tag, the engine (kind, stage, dtype, universal). What became of it on each rank."""
    special = {"frozen": {"frozen": True}, "excluded": {"frozen": True}, "experts": {"experts": True}}
    told = []
    for order in json.loads(Path(orders).read_text()):
        function = {"pipeline": pipeline_of, "tensors": tensors_of}.get(order["kind"], engine_of)
        if order.get("evaluation"):
            function = evaluating
        more = {"tensor": order["tensor"]} if "tensor" in order else special.get(order["kind"], {})
        engine, answer = None, {}
        try:
            no_grid()
            engine = function(
                order["stage"],
                order["dtype"],
                seed=99,
                universal=order.get("universal", False),
                **more,
            )
            path, state = engine.load_checkpoint(order["folder"], tag=order.get("tag"), **order.get("load", {}))
            answer = {"path": path and str(path), "state": state is not None, "step": engine.global_steps}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:600]}
        everyone = [None] * comm.get_world_size()
        torch.distributed.all_gather_object(everyone, answer)
        if engine is not None and all("error" not in each for each in everyone):
            answer["held"] = held(engine)
        torch.distributed.all_gather_object(everyone, answer)
        told.append({**order, "ranks": everyone})
        if engine is not None:
            engine.destroy()
        if os.environ["RANK"] == "0":
            Path(answers).write_text(json.dumps(told, indent=1))


def main():
    # the converter reads sys.argv too, which is then its own
    what, *given = sys.argv[1:]
    deepspeed.init_distributed("gloo")
    if what == "make":
        make(Path(given[0]), given[1:])
    elif what == "make-two":
        # two trainings of the same kinds; the second one has other weights
        make(Path(given[0]), given[2:])
        make(Path(given[1]), given[2:], SEED + 1, convert=False)
    elif what == "hugging-face":
        hugging_face(Path(given[0]), given[1])
    elif what == "fill":
        fill(Path(given[0]))
    else:
        load(*given)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    if "dsdoctor.run" not in sys.modules:
        # at the interpreter's end torch's gloo threads now and then end in std::terminate, after all is said and done
        os._exit(0)
