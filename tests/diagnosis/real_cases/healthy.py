"""Runs that end well, and say frightening things on the way. Their answer is null."""

from __future__ import annotations

from .case import Case
from .configuration import HUGGING_FACE
from .ranks import PARSE

OVERFLOWS = """\
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

scaler = DynamicLossScaler(2**20, scale_window=4, min_scale=1, delayed_shift=1, consecutive_hysteresis=False)


def scale(step):
    overflow = step < 6
    if overflow and RANK == 0:
        print(f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {scaler.cur_scale}, reducing", flush=True)
    scaler.update_scale(overflow)


train(start(stage=STAGE), 14, scale)
"""


def healthy(name: str, code: str, **changes: object) -> Case:
    return Case(name=name, category="healthy", cause=None, code=code, **changes)  # type: ignore[arg-type]


HEALTHY = (
    healthy("stage-0", "train(start(stage=0), 12)\n"),
    healthy("stage-1-tee", "train(start(stage=1), 8)\n", launch="tee"),
    healthy("stage-2-deepspeed", PARSE + "train(start(stage=2), 8)\n", launch="deepspeed"),
    healthy("stage-3-srun", "train(start(stage=3), 6)\n", launch="srun", ranks=3),
    healthy("stage-3-verbose", "train(start(stage=3, steps_per_print=1, wall_clock_breakdown=True), 5)\n"),
    healthy("overflow-skips", OVERFLOWS.replace("STAGE", "0")),
    healthy("overflow-skips-stage-2", OVERFLOWS.replace("STAGE", "2"), launch="tee"),
    healthy("memory-breakdown", "train(start(stage=2, memory_breakdown=True, steps_per_print=1), 3)\n"),
    healthy(
        "save-and-resume",
        'engine = start(stage=2)\ntrain(engine, 3)\nengine.save_checkpoint("ckpt")\nengine = start(stage=2)\n'
        'print(engine.load_checkpoint("ckpt")[0])\ntrain(engine, 3)\n',
    ),
    healthy(
        "bad-samples-skipped",
        """\
import logging
import traceback

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


def look(step):
    if step % 3 == 0 and RANK == 0:
        try:
            raise UnicodeDecodeError("utf-8", b"\\xff", 0, 1, "invalid start byte")
        except UnicodeDecodeError:
            logging.warning("skipping a sample that cannot be read: %s", traceback.format_exc())
        logging.error("tracker: connection refused, will retry in 30 s (errors so far: %d)", step)


train(start(stage=1), 9, look)
print("finished: 0 errors, 3 samples failed, exit code 0")
""",
    ),
    healthy(
        "evaluation",
        """\
engine = start(stage=3)
for epoch in range(2):
    train(engine, 3)
    engine.eval()
    with torch.no_grad():
        loss = engine(batch(engine)).item()
    print(f"epoch {epoch}: eval loss {loss:.4f}, error rate 0.37, failed to beat the best, killed runs 0")
    engine.train()
""",
    ),
    healthy("store-retries", "if RANK == 0:\n    time.sleep(6)\ntrain(start(stage=2), 4)\n", launch="srun"),
    healthy(
        "trainer",
        HUGGING_FACE + 'trainer({"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}, '
        '"bf16": {"enabled": "auto"}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}).train()\n',
        whole=True,
    ),
    healthy(
        "accelerate",
        'import warnings\n\nwarnings.simplefilter("always")\ntrain(start(stage=2), 6)\ndist.destroy_process_group()\n',
        launch="accelerate",
    ),
    healthy(
        "debug-detail",
        "train(start(stage=1), 2)\n",
        environment={"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"},
    ),
    healthy(
        "data-workers-leave",
        """\
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(32)


engine = start(stage=2)
for step, x in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=6)):
    loss = engine(x.bfloat16())
    engine.backward(loss)
    engine.step()
    print(f"step {step} loss {loss.item():.4f}", flush=True)
""",
    ),
    healthy(
        "bad-sample-under-stage-3",
        """\
class Fragile(Model):
    fails = False

    def forward(self, x):
        hidden = self.embed(x)
        if self.fails:
            raise ValueError("bad sample")
        return self.head(self.norm(hidden)).pow(2).mean()


engine = start(Fragile(), zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
train(engine, 3)
engine.module.fails = True
try:
    engine(batch(engine))
except ValueError as error:
    print("skipping a bad sample:", error)
engine.module.fails = False
engine.eval()
train(engine, 2)
""",
    ),
    healthy(
        "other-modules-each-step",
        """\
class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])
        self.step = 0

    def forward(self, x):
        self.step += 1
        chosen = self.layers if self.step < 3 else [self.layers[1], self.layers[0], self.layers[1]]
        for layer in chosen:
            x = layer(x)
        return x.pow(2).mean()


engine = start(Changing(), zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
for step in range(6):
    loss = engine(batch(engine))
    if step == 3:
        loss = engine(batch(engine)) + loss
    engine.backward(loss)
    engine.step()
    print("step", step, loss.item())
""",
    ),
    healthy("log-dir", "train(start(stage=3), 4)\n", launch="log-dir"),
)
