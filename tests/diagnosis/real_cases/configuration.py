"""Configurations that DeepSpeed, transformers or accelerate refuse."""

from __future__ import annotations

from .case import Case

HUGGING_FACE = """\
import json

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        tokens = torch.arange(8) + index
        return {"input_ids": tokens, "labels": tokens}


def trainer(config, **changes):
    given = {"learning_rate": 5e-5, "per_device_train_batch_size": 2, "max_steps": 4, "report_to": "none", "bf16": True, **changes}
    arguments = TrainingArguments(output_dir="out", deepspeed=config, use_cpu=True, logging_steps=1, save_strategy="no", **given)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    return Trainer(model=model, args=arguments, train_dataset=Lines())


"""

CONFIGURATION = (
    Case(
        name="batch-identity",
        category="config",
        cause="train_batch_size is not micro batch x gradient accumulation x world size",
        words=("batch", "gradient_accumulation"),
        code="engine = start(train_batch_size=16, gradient_accumulation_steps=3)\ntrain(engine, 3)\n",
    ),
    Case(
        name="batch-identity-tee",
        category="config",
        launch="tee",
        cause="train_batch_size is not micro batch x gradient accumulation x world size",
        words=("batch", "gradient_accumulation"),
        code="engine = start(train_batch_size=16, gradient_accumulation_steps=3)\ntrain(engine, 3)\n",
    ),
    Case(
        name="batch-identity-srun",
        category="config",
        launch="srun",
        cause="train_batch_size is not micro batch x gradient accumulation x world size",
        words=("batch", "gradient_accumulation"),
        code="engine = start(train_batch_size=16, gradient_accumulation_steps=3)\ntrain(engine, 3)\n",
    ),
    Case(
        name="no-batch-size",
        category="config",
        cause="the configuration holds no batch size at all",
        words=("train_batch_size",),
        code="engine = start(train_micro_batch_size_per_gpu=None)\ntrain(engine, 3)\n",
    ),
    Case(
        name="unknown-zero-key",
        category="config",
        launch="deepspeed",
        cause="zero_optimization.overlap_com is no key of DeepSpeed (overlap_comm is)",
        words=("overlap_com",),
        code='import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument("--local_rank", type=int)\n'
        "parser.parse_args()\n"
        'engine = start(zero_optimization={"stage": 2, "overlap_com": True})\ntrain(engine, 3)\n',
    ),
    Case(
        name="wrong-type",
        category="config",
        cause="zero_optimization.reduce_bucket_size is text where a number is wanted",
        words=("reduce_bucket_size",),
        code='engine = start(zero_optimization={"stage": 2, "reduce_bucket_size": "50MB"})\ntrain(engine, 3)\n',
    ),
    Case(
        name="stage-four",
        category="config",
        cause="there is no ZeRO stage 4",
        words=("stage",),
        code="engine = start(stage=4)\ntrain(engine, 3)\n",
    ),
    Case(
        name="auto-without-hf",
        category="config",
        cause='"auto" is filled in by Hugging Face only; here DeepSpeed gets it itself',
        words=("auto",),
        code='engine = start(train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto")\ntrain(engine, 3)\n',
    ),
    Case(
        name="auto-warmup-without-hf",
        category="config",
        cause='"auto" is left in the scheduler\'s parameters, which only Hugging Face fills in',
        words=("auto",),
        code='scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 10}}\n'
        "engine = start(scheduler=scheduler)\ntrain(engine, 3)\n",
    ),
    Case(
        name="fp16-and-bf16",
        category="config",
        cause="fp16 and bf16 are both on",
        words=("fp16", "bf16"),
        code='engine = start(fp16={"enabled": True})\ntrain(engine, 3)\n',
    ),
    Case(
        name="fp16-on-the-cpu",
        category="config",
        cause="fp16 is on, and this accelerator (the CPU) has no fp16",
        words=("fp16",),
        code='engine = start(bf16=None, fp16={"enabled": True})\ntrain(engine, 3)\n',
    ),
    Case(
        name="optimizer-unknown",
        category="config",
        cause="the optimizer type AdamWW does not exist",
        words=("AdamWW",),
        code='engine = start(optimizer={"type": "AdamWW", "params": {"lr": 1e-3}})\ntrain(engine, 3)\n',
    ),
    Case(
        name="scheduler-parameter",
        category="config",
        cause="WarmupLR has no parameter warmup_steps (it is warmup_num_steps)",
        words=("warmup_steps",),
        code='engine = start(scheduler={"type": "WarmupLR", "params": {"warmup_steps": 10}})\ntrain(engine, 3)\n',
    ),
    Case(
        name="client-optimizer-offload",
        category="config",
        cause="ZeRO-Offload with an optimizer that the script made itself, which is not DeepSpeedCPUAdam",
        words=("offload", "optimizer"),
        code="""\
model = Model()
config = {**BASE, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
del config["optimizer"]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
train(engine, 3)
""",
    ),
    Case(
        name="untested-optimizer",
        category="config",
        cause="ZeRO with an optimizer it was not tested with, without zero_allow_untested_optimizer",
        words=("zero_allow_untested_optimizer",),
        code="""\
model = Model()
optimizer = torch.optim.Rprop(model.parameters(), lr=1e-3)
config = {key: value for key, value in BASE.items() if key != "optimizer"}
engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
train(engine, 3)
""",
    ),
    Case(
        name="config-file-missing",
        category="config",
        cause="the configuration file configs/ds_config.json does not exist at that path",
        words=("ds_config.json",),
        code="model = Model()\n"
        'engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="configs/ds_config.json")[0]\n',
    ),
    Case(
        name="config-file-broken",
        category="config",
        cause="the configuration file is no valid JSON",
        words=("JSON",),
        code="""\
if RANK == 0:
    with open("ds_config.json", "w") as file:
        file.write('{"train_batch_size": 4, "zero_optimization": {"stage": 2, "optimizer": [}')
time.sleep(2)
model = Model()
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")[0]
""",
    ),
    Case(
        name="no-config",
        category="config",
        cause="no DeepSpeed configuration was given to deepspeed.initialize",
        words=("config",),
        code="model = Model()\nengine = deepspeed.initialize(model=model, model_parameters=model.parameters())[0]\n",
    ),
    Case(
        name="hf-mismatch",
        category="config",
        whole=True,
        cause="learning rate and batch size of ds_config differ from the TrainingArguments",
        words=("TrainingArguments", "mismatch"),
        code=HUGGING_FACE
        + """\
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": "auto"},
}
trainer(config).train()
""",
    ),
    Case(
        name="hf-bf16-mismatch",
        category="config",
        whole=True,
        cause="bf16 is on in ds_config and off in the TrainingArguments",
        words=("bf16",),
        code=HUGGING_FACE
        + """\
config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
trainer(config, bf16=False).train()
""",
    ),
    Case(
        name="hf-removed-argument",
        category="versions",
        whole=True,
        cause="TrainingArguments has no evaluation_strategy any more (it is eval_strategy now)",
        words=("evaluation_strategy", "eval_strategy"),
        code=HUGGING_FACE + 'trainer(None, evaluation_strategy="steps").train()\n',
    ),
    Case(
        name="accelerate-two-optimizers",
        category="config",
        launch="accelerate",
        whole=True,
        cause="an optimizer in the DeepSpeed configuration and another in the code given to accelerate.prepare",
        words=("optimizer", "code"),
        code="""\
import torch
from accelerate import Accelerator, DeepSpeedPlugin

config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
""",
    ),
    Case(
        name="accelerate-no-loader",
        category="config",
        launch="accelerate",
        whole=True,
        cause="accelerate.prepare got no dataloader and cannot fill the micro batch size",
        words=("dataloader", "train_micro_batch_size_per_gpu"),
        code="""\
import torch
from accelerate import Accelerator, DeepSpeedPlugin

config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
""",
    ),
)
