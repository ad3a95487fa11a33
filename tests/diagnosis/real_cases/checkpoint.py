"""Saving and loading."""

from __future__ import annotations

from .case import Case

CHECKPOINT = (
    Case(
        name="other-world-size",
        category="checkpoint",
        ranks=1,
        cause="the checkpoint was written by two ranks and is loaded by one",
        words=("world size", "2", "1"),
        prepare='sed "s/^train(engine, 2).*/train(engine, 2); engine.save_checkpoint(\\"ckpt\\"); sys.exit()/"'
        " train.py > first.py\n"
        "$PYTHON -m torch.distributed.run --nproc-per-node 2 --master-port 29871 first.py > first.log 2>&1",
        code='engine = start(stage=2)\ntrain(engine, 2)\nengine.load_checkpoint("ckpt")\n',
    ),
    Case(
        name="other-stage",
        category="checkpoint",
        cause="the checkpoint was written with ZeRO stage 1 and is loaded with stage 3",
        words=("stage",),
        code='engine = start(stage=1)\ntrain(engine, 2)\nengine.save_checkpoint("ckpt")\nengine = start(stage=3)\n'
        'engine.load_checkpoint("ckpt")\n',
    ),
    Case(
        name="stage-3-into-stage-2",
        category="checkpoint",
        launch="deepspeed",
        cause="the checkpoint was written with ZeRO stage 3 and is loaded with stage 2",
        words=("stage",),
        code='engine = start(stage=3)\ntrain(engine, 2)\nengine.save_checkpoint("ckpt")\nengine = start(stage=2)\n'
        'engine.load_checkpoint("ckpt")\n',
    ),
    Case(
        name="truncated-shard",
        category="checkpoint",
        where="rank 1",
        cause="the optimizer shard of rank 1 is cut off: the save was interrupted",
        words=("checkpoint", "truncated"),
        code="""\
engine = start(stage=2)
train(engine, 2)
engine.save_checkpoint("ckpt", tag="global_step2")
dist.barrier()
if RANK == 1:
    from pathlib import Path

    shard = next(Path("ckpt/global_step2").glob("*zero_pp_rank_1*optim*"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
dist.barrier()
engine.load_checkpoint("ckpt")
""",
    ),
    Case(
        name="empty-model-file",
        category="checkpoint",
        cause="mp_rank_00_model_states.pt is empty",
        words=("mp_rank_00_model_states", "empty"),
        code="""\
engine = start(stage=2)
train(engine, 2)
engine.save_checkpoint("ckpt", tag="global_step2")
dist.barrier()
open("ckpt/global_step2/mp_rank_00_model_states.pt", "w").close()
engine.load_checkpoint("ckpt")
""",
    ),
    Case(
        name="missing-shard",
        category="checkpoint",
        cause="the shards of one rank are not there (they lie on another node's own disk)",
        words=("missing", "zero_pp_rank_1"),
        code="""\
engine = start(stage=3)
train(engine, 2)
engine.save_checkpoint("ckpt", tag="global_step2")
dist.barrier()
if RANK == 0:
    from pathlib import Path

    for shard in Path("ckpt/global_step2").glob("zero_pp_rank_1*"):
        shard.unlink()
dist.barrier()
engine.load_checkpoint("ckpt")
""",
    ),
    Case(
        name="missing-optimizer-shard",
        category="checkpoint",
        cause="the optimizer shard of one rank is not in the checkpoint",
        words=("missing", "optim"),
        code="""\
engine = start(stage=2)
train(engine, 2)
engine.save_checkpoint("ckpt", tag="global_step2")
dist.barrier()
if RANK == 0:
    from pathlib import Path

    for shard in Path("ckpt/global_step2").glob("*zero_pp_rank_1*optim*"):
        shard.unlink()
dist.barrier()
engine.load_checkpoint("ckpt")
""",
    ),
    Case(
        name="weights-only",
        category="checkpoint",
        ranks=1,
        cause="torch.load refuses a checkpoint that holds other things than tensors, because weights_only is True now",
        words=("weights_only",),
        code="""\
import argparse

engine = start()
train(engine, 2)
torch.save({"step": 2, "args": argparse.Namespace(lr=1e-3)}, "state.pt")
state = torch.load("state.pt")
""",
    ),
    Case(
        name="universal-missing",
        category="checkpoint",
        cause="load_universal is on, and the checkpoint was never converted by ds_to_universal",
        words=("universal",),
        code="""\
engine = start(stage=2)
train(engine, 2)
engine.save_checkpoint("ckpt")
engine = start(stage=2, checkpoint={"load_universal": True})
engine.load_checkpoint("ckpt")
""",
    ),
    Case(
        name="nothing-loaded",
        category="checkpoint",
        cause="there is no checkpoint in the folder: load_checkpoint gave (None, None)",
        words=("checkpoint", "None"),
        code="""\
engine = start(stage=2)
path, state = engine.load_checkpoint("/data/ckpt/run-17")
first = state["step"] + 1
train(engine, 2)
""",
    ),
    Case(
        name="nothing-loaded-silent",
        category="checkpoint",
        cause="there is no checkpoint in the folder: the run began anew in silence",
        words=("checkpoint", "latest"),
        code='engine = start(stage=2)\nengine.load_checkpoint("/data/ckpt/run-17")\ntrain(engine, 4)\n',
    ),
    Case(
        name="other-model",
        category="checkpoint",
        cause="the checkpoint belongs to another model: a layer was added since",
        words=("state_dict", "missing"),
        code="""\
class Longer(Model):
    def __init__(self):
        super().__init__()
        self.adapter = nn.Linear(32, 32)


engine = start(stage=1)
train(engine, 2)
engine.save_checkpoint("ckpt")
engine = start(Longer(), stage=1)
engine.load_checkpoint("ckpt")
""",
    ),
    Case(
        name="tag-differs",
        category="checkpoint",
        cause="the ranks gave different tags to save_checkpoint",
        words=("tag", "rank"),
        code='engine = start(stage=2, checkpoint={"tag_validation": "Fail"})\ntrain(engine, 2)\n'
        'engine.save_checkpoint("ckpt", tag=f"step-{time.time_ns()}")\n',
    ),
    Case(
        name="disk-full",
        category="environment",
        prepare="mkdir small && mount -t tmpfs -o size=32k tmpfs small",
        cause="no space left on the disk while the checkpoint is written",
        words=("space",),
        code='engine = start(Model(), stage=2)\ntrain(engine, 4)\nengine.save_checkpoint("small/ckpt")\n',
    ),
    Case(
        name="disk-full-srun",
        category="environment",
        launch="srun",
        cause="no space left on the disk while the checkpoint is written",
        words=("space",),
        code="""\
if RANK == 0:
    os.makedirs("small", exist_ok=True)
    import ctypes

    ctypes.CDLL(None).unshare(0x00020000)
    os.system("mount --make-rprivate / && mount -t tmpfs -o size=48k tmpfs small")
engine = start(stage=2)
train(engine, 4)
engine.save_checkpoint("small/ckpt")
""",
    ),
    Case(
        name="read-only-folder",
        category="environment",
        prepare="mkdir fixed && mount -t tmpfs -o ro tmpfs fixed",
        cause="the checkpoint's folder is on a read-only file system",
        words=("read-only",),
        code='engine = start(stage=2)\ntrain(engine, 2)\nengine.save_checkpoint("fixed/ckpt")\n',
    ),
    Case(
        name="save-on-rank-0-only",
        category="checkpoint",
        where="rank 0 is in save_checkpoint, rank 1 in the next step",
        cause="save_checkpoint is called by rank 0 alone; all ranks have to call it",
        words=("save_checkpoint", "all ranks"),
        code="""\
from datetime import timedelta

deepspeed.init_distributed("gloo", timeout=timedelta(seconds=12))
engine = start(stage=3)
train(engine, 3)
if RANK == 0:
    engine.save_checkpoint("ckpt")
train(engine, 3)
""",
    ),
    Case(
        name="safetensors-truncated",
        category="checkpoint",
        whole=True,
        ranks=1,
        cause="model.safetensors is cut off",
        words=("safetensors",),
        code="""\
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)).save_pretrained("model")
with open("model/model.safetensors", "r+b") as file:
    file.truncate(9000)
model = AutoModelForCausalLM.from_pretrained("model")
""",
    ),
)
