"""What fails inside ZeRO, the pipeline and the mixture of experts."""

from __future__ import annotations

from .case import Case

ENGINE = (
    Case(
        name="state-dict-into-stage-3",
        category="zero",
        cause="plain weights are loaded into a ZeRO-3 model whose parameters are partitioned, so their shape is [0]",
        words=("ZeRO-3", "gather"),
        code="""\
plain = Model().state_dict()
engine = start(stage=3)
engine.module.load_state_dict(plain)
""",
    ),
    Case(
        name="weight-outside-gather",
        category="zero",
        cause="a ZeRO-3 parameter is used outside the module that owns it, while it is partitioned",
        words=("ZeRO-3", "GatheredParameters"),
        code="""\
engine = start(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
train(engine, 2)
scores = batch(engine) @ engine.module.embed.weight.t()
print(scores.shape)
""",
    ),
    Case(
        name="weight-must-be-2d",
        category="zero",
        cause="an embedding's weight is partitioned by ZeRO-3 and used without its module's hooks, so it has no second dimension",
        words=("ZeRO-3", "gather"),
        code="""\
class Words(Model):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, 32)

    def forward(self, tokens):
        return super().forward(nn.functional.embedding(tokens, self.words.weight))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Words()

    def forward(self, tokens):
        return self.inner(tokens)


engine = start(Outer(), zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
inner = engine.module.inner
hidden = nn.functional.embedding(torch.ones(2, 4, dtype=torch.long), inner.words.weight)
""",
    ),
    Case(
        name="already-reduced",
        category="zero",
        cause="a layer is used twice under re-entrant activation checkpointing, so its gradient is reduced twice",
        words=("reduced", "reentrant"),
        code="""\
from torch.utils.checkpoint import checkpoint


class Twice(Model):
    def forward(self, x):
        x = x.requires_grad_()
        x = checkpoint(self.embed, x, use_reentrant=True)
        x = checkpoint(self.embed, x, use_reentrant=True)
        return self.head(self.norm(x)).pow(2).mean()


engine = start(Twice(), stage=2)
train(engine, 3)
""",
    ),
    Case(
        name="experts-differ-between-ranks",
        category="moe",
        limit=60,
        where="rank 1 uses another expert than rank 0",
        cause="under ZeRO-3 the ranks run different experts, so their gathers no longer fit; the block must be a leaf module",
        words=("leaf",),
        code="""\
from datetime import timedelta

deepspeed.init_distributed("gloo", timeout=timedelta(seconds=15))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.experts[RANK % 2](x)).pow(2).mean()


engine = start(Experts(), zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
train(engine, 3)
""",
    ),
    Case(
        name="experts-not-divisible",
        category="moe",
        cause="three experts cannot be spread over an expert-parallel size of 2",
        words=("experts", "ep_size"),
        code="""\
from deepspeed.moe.layer import MoE

deepspeed.init_distributed("gloo")
layer = MoE(hidden_size=32, expert=nn.Linear(32, 32), num_experts=3, ep_size=2)
""",
    ),
    Case(
        name="nothing-to-train",
        category="zero",
        cause="every parameter is frozen, so the loss has no gradient",
        words=("requires_grad",),
        code="""\
model = Model()
for name, parameter in model.named_parameters():
    parameter.requires_grad = name.startswith("norm")
engine = start(model)
engine.module.norm.requires_grad_(False)
loss = engine(batch(engine))
engine.backward(loss)
""",
    ),
    Case(
        name="gradient-none",
        category="zero",
        cause="a parameter got no gradient in this step (its branch was not used), and the script reads it",
        words=("gradient", "None"),
        code="""\
class Unused(Model):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(32, 32)


model = Unused()
engine = start(model, stage=1)
loss = engine(batch(engine))
engine.backward(loss)
print("norm of the gradient", engine.module.other.weight.grad.norm())
""",
    ),
    Case(
        name="dtype-of-the-input",
        category="zero",
        cause="the engine holds bf16 weights and is given float32 input",
        words=("dtype",),
        code="engine = start()\nloss = engine(torch.randn(2, 32))\nengine.backward(loss)\n",
    ),
    Case(
        name="backward-twice",
        category="zero",
        cause="backward runs twice over the same graph",
        words=("backward", "second"),
        code="engine = start()\nloss = engine(batch(engine))\nengine.backward(loss)\nengine.step()\nengine.backward(loss)\n",
    ),
    Case(
        name="no-sync-stage-2",
        category="zero",
        cause="no_sync (gradient accumulation by the caller) does not work with ZeRO stage 2",
        words=("no_sync", "stage"),
        code="engine = start(stage=2)\nwith engine.no_sync():\n    loss = engine(batch(engine))\n    engine.backward(loss)\n",
    ),
    Case(
        name="pipeline-forward",
        category="pipeline",
        cause="a pipeline engine is called like a model; only train_batch and eval_batch exist",
        words=("train_batch",),
        code="""\
from deepspeed.pipe import PipelineModule

deepspeed.init_distributed("gloo")
net = PipelineModule([nn.Linear(32, 32), nn.Linear(32, 1)], num_stages=2, loss_fn=lambda out, y: out.pow(2).mean())
engine = start(net, stage=0, bf16=None)
loss = engine(torch.randn(2, 32))
""",
    ),
    Case(
        name="pipeline-stages",
        category="pipeline",
        cause="three pipeline stages on two ranks",
        words=("stages", "world"),
        code="""\
from deepspeed.pipe import PipelineModule

deepspeed.init_distributed("gloo")
net = PipelineModule([nn.Linear(32, 32) for _ in range(6)], num_stages=3, loss_fn=lambda out, y: out.pow(2).mean())
""",
    ),
    Case(
        name="pipeline-with-stage-2",
        category="pipeline",
        cause="pipeline parallelism does not work with ZeRO stage 2",
        words=("pipeline", "stage"),
        code="""\
from deepspeed.pipe import PipelineModule

deepspeed.init_distributed("gloo")
net = PipelineModule([nn.Linear(32, 32), nn.Linear(32, 1)], num_stages=2, loss_fn=lambda out, y: out.pow(2).mean())
engine = start(net, stage=2)
""",
    ),
    Case(
        name="loss-scale-minimum",
        category="numerics",
        ranks=1,
        cause="every fp16 step overflows until the loss scale is at its minimum (DeepSpeed's scaler without an engine)",
        words=("loss scale", "overflow"),
        code="""\
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

scaler = DynamicLossScaler(2**5, scale_window=1000, min_scale=1, delayed_shift=1, consecutive_hysteresis=False)
for step in range(1, 12):
    print(f"step {step} loss inf overflow True skipped {step}", flush=True)
    scaler.update_scale(True)
""",
    ),
    Case(
        name="nan-losses",
        category="numerics",
        where="from step 6 on",
        cause="the loss is nan from step 6 on: a learning rate that is far too high, and the run ends with status 0 all the same",
        words=("nan", "step 6"),
        code="""\
class Diverging(Model):
    step = 0

    def forward(self, x):
        self.step += 1
        return super().forward(x) / (0.0 if self.step > 5 else 1.0) - (float("inf") if self.step > 5 else 0.0)


engine = start(Diverging(), stage=0, bf16=None)
train(engine, 16)
""",
    ),
)
