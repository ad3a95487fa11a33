"""Memory, /dev/shm, NVMe, versions, launchers."""

from __future__ import annotations

from .case import Case

GONE = "train(start(stage=2), 2)\n"

SURROUNDINGS = (
    Case(
        name="host-allocation",
        category="memory",
        prepare="ulimit -v 9000000",
        cause="the host's memory (here: the limit of the address space) does not hold the allocation",
        words=("host", "memory"),
        code="engine = start(stage=2)\ntrain(engine, 2)\ncache = torch.empty(40_000_000_000, dtype=torch.uint8)\n",
    ),
    Case(
        name="reduce-bucket-allocation",
        category="memory",
        prepare="ulimit -v 16000000",
        cause="a reduce bucket of 2e10 elements does not fit into memory",
        words=("reduce_bucket_size", "memory"),
        code='engine = start(zero_optimization={"stage": 3, "reduce_bucket_size": 20_000_000_000})\ntrain(engine, 2)\n',
    ),
    Case(
        name="python-memory-error",
        category="memory",
        ranks=1,
        prepare="ulimit -v 9000000",
        cause="Python ran out of memory while it read the data",
        words=("memory",),
        code="engine = start(stage=2)\nrows = bytearray(60_000_000_000)\n",
    ),
    Case(
        name="shm-full",
        category="memory",
        prepare="mount -t tmpfs -o size=300k tmpfs /dev/shm",
        cause="/dev/shm is too small for the batches of the DataLoader workers",
        words=("/dev/shm",),
        ranks=1,
        code="""\
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.randn(3, 224, 224)


engine = start(stage=2)
for images in torch.utils.data.DataLoader(Images(), batch_size=8, num_workers=2):
    print(images.shape, flush=True)
""",
    ),
    Case(
        name="nvme-without-path",
        category="nvme",
        cause="offload to nvme without nvme_path",
        words=("nvme_path",),
        code='engine = start(zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme"}})\ntrain(engine, 2)\n',
    ),
    Case(
        name="nvme-path",
        category="nvme",
        cause="the offload's nvme_path cannot be made or written, or async_io (libaio) is missing: the log says which",
        words=("nvme",),
        code="""\
offload = {"device": "nvme", "nvme_path": "/proc/nvme0"}
engine = start(zero_optimization={"stage": 3, "offload_optimizer": offload, "offload_param": offload})
train(engine, 2)
""",
    ),
    Case(
        name="transformers-adamw",
        category="versions",
        whole=True,
        cause="transformers no longer has AdamW; it was removed and torch.optim.AdamW takes its place",
        words=("AdamW", "torch.optim"),
        code="import deepspeed\nfrom transformers import AdamW\n",
    ),
    Case(
        name="torch-six",
        category="versions",
        whole=True,
        cause="torch._six was removed from torch; the code that imports it is too old for this torch",
        words=("torch._six",),
        code="import deepspeed\nfrom torch._six import inf\n",
    ),
    Case(
        name="transformers-deepspeed-module",
        category="versions",
        whole=True,
        cause="transformers.deepspeed was moved to transformers.integrations.deepspeed and removed",
        words=("transformers.integrations",),
        code="from transformers.deepspeed import HfDeepSpeedConfig\n",
    ),
    Case(
        name="numpy-float",
        category="versions",
        whole=True,
        ranks=1,
        cause="np.float was removed from numpy",
        words=("numpy",),
        code="import deepspeed\nimport numpy as np\n\nscores = np.zeros(4, dtype=np.float)\n",
    ),
    Case(
        name="trainer-tokenizer",
        category="versions",
        whole=True,
        ranks=1,
        cause="Trainer has no argument tokenizer any more (it is processing_class now)",
        words=("tokenizer", "processing_class"),
        code="""\
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2))
Trainer(model=model, args=TrainingArguments(output_dir="out", use_cpu=True, report_to="none"), tokenizer=None)
""",
    ),
    Case(
        name="flash-attention-missing",
        category="versions",
        whole=True,
        cause="flash_attention_2 is asked for and flash_attn is not installed (or needs a GPU)",
        words=("flash",),
        code="""\
from transformers import AutoModelForCausalLM, GPT2Config

config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)
model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2")
""",
    ),
    Case(
        name="amp-removed",
        category="versions",
        cause="torch.cuda.amp / apex is asked for and apex is not installed",
        words=("apex",),
        code='engine = start(bf16=None, amp={"enabled": True, "opt_level": "O1"})\ntrain(engine, 2)\n',
    ),
    Case(
        name="hub-unreachable",
        category="environment",
        whole=True,
        cause="the model is not in the local cache and the hub is off (HF_HUB_OFFLINE=1) or out of reach",
        words=("HF_HUB_OFFLINE",),
        code="from transformers import AutoModelForCausalLM\n\n"
        'model = AutoModelForCausalLM.from_pretrained("our-team/llama-7b-sft")\n',
    ),
    Case(
        name="mpi-without-launcher",
        category="launch",
        launch="plain",
        ranks=1,
        cause="the script was started with plain python: no launcher set RANK and WORLD_SIZE, so DeepSpeed looks for MPI",
        words=("launcher", "mpi4py"),
        code='deepspeed.init_distributed("gloo")\nengine = start(stage=2)\n',
    ),
    Case(
        name="local-rank-argument",
        category="launch",
        launch="deepspeed",
        cause="the deepspeed launcher gives --local_rank, which the script's own argument parser does not know",
        words=("--local_rank",),
        code='import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument("--model", default="gpt2")\n'
        "arguments = parser.parse_args()\n",
    ),
    Case(
        name="script-missing",
        category="launch",
        cause="the training script pretrain.py does not exist in that folder",
        words=("pretrain.py",),
        launcher_arguments=("pretrain.py",),
        code="",
    ),
    Case(
        name="script-missing-deepspeed",
        category="launch",
        launch="deepspeed",
        cause="the training script pretrain.py does not exist in that folder",
        words=("pretrain.py",),
        launcher_arguments=("pretrain.py",),
        code="",
    ),
    Case(
        name="include-unknown-slot",
        category="launch",
        launch="plain",
        whole=True,
        ranks=1,
        cause="--include names slot 9 of a host that has fewer",
        words=("slot", "9"),
        code="""\
import subprocess
import sys

with open("hostfile", "w") as file:
    file.write("localhost slots=2\\n")
command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile", "--include", "localhost:9", "x.py"]
raise SystemExit(subprocess.call(command))
""",
    ),
    Case(
        name="hostfile-bad-line",
        category="launch",
        launch="plain",
        whole=True,
        ranks=1,
        cause="a line of the hostfile is not of the form `host slots=N`",
        words=("hostfile", "slots"),
        code="""\
import subprocess
import sys

with open("hostfile", "w") as file:
    file.write("node1 8\\nnode2 slots=8\\n")
raise SystemExit(subprocess.call([sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile", "x.py"]))
""",
    ),
    Case(
        name="second-node-without-ssh",
        category="launch",
        launch="plain",
        whole=True,
        ranks=1,
        cause="the host worker-1 of the hostfile cannot be reached by ssh",
        words=("ssh", "worker-1"),
        code="""\
import subprocess
import sys

with open("hostfile", "w") as file:
    file.write("worker-1 slots=8\\nworker-2 slots=8\\n")
raise SystemExit(subprocess.call([sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile", "x.py"]))
""",
    ),
    Case(
        name="pdsh-missing",
        category="launch",
        launch="plain",
        whole=True,
        ranks=1,
        cause="two nodes, and the program pdsh, which starts the ranks on them, is not installed",
        words=("pdsh",),
        code="""\
import os
import subprocess
import sys

with open("hostfile", "w") as file:
    file.write("worker-1 slots=8\\nworker-2 slots=8\\n")
runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile"]
command = [*runner, "--no_ssh_check", "--master_addr", "10.0.0.1", "x.py"]
raise SystemExit(subprocess.call(command, env={**os.environ, "PATH": "/opt/none"}))
""",
    ),
    Case(
        name="pdsh-hosts-unknown",
        category="launch",
        launch="plain",
        whole=True,
        ranks=1,
        cause="the names of the hostfile's hosts cannot be resolved",
        words=("worker-1", "name"),
        code="""\
import subprocess
import sys

with open("hostfile", "w") as file:
    file.write("worker-1 slots=8\\nworker-2 slots=8\\n")
runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile"]
command = [*runner, "--no_ssh_check", "--master_addr", "10.0.0.1", "x.py"]
raise SystemExit(subprocess.call(command))
""",
    ),
    Case(
        name="accelerate-without-ranks",
        category="launch",
        launch="accelerate-cpu",
        cause="accelerate launch --cpu started one process without RANK and WORLD_SIZE, so DeepSpeed looks for MPI",
        words=("launcher", "mpi4py"),
        code='deepspeed.init_distributed("gloo")\nengine = start(stage=2)\n',
    ),
    Case(
        name="import-in-one-rank",
        category="versions",
        where="both ranks",
        cause="the module peft is not installed",
        words=("peft",),
        launch="tee",
        code="from peft import LoraConfig, get_peft_model\n",
    ),
)
