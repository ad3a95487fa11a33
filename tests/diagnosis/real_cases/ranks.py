"""Ranks that die, hang, raise or disagree."""

from __future__ import annotations

from .case import Case

RAISES = """\
def bad_sample(step):
    if RANK == 1 and step == 3:
        raise ValueError("sample 4711 has 2049 tokens, at most 2048 are allowed")


engine = start(stage=STAGE)
train(engine, 6, bad_sample)
"""
PARSE = (
    "import argparse\n\nparser = argparse.ArgumentParser()\n"
    'parser.add_argument("--local_rank", type=int)\nparser.parse_args()\n'
)
DIES = """\
import signal


def dies(step):
    if RANK == 1 and step == 3:
        time.sleep(0.5)
        HOW


engine = start(stage=2)
train(engine, 6, dies)
"""
TIMEOUT = 'from datetime import timedelta\n\ndeepspeed.init_distributed("gloo", timeout=timedelta(seconds=12))\n'
RAISED = "rank 1 raised ValueError in step 3 (a sample that is too long); the others only lost their connection to it"


def raising(name: str, launch: str, stage: int = 2, ranks: int = 2) -> Case:
    return Case(
        name=f"raises-{name}",
        category="ranks",
        launch=launch,
        ranks=ranks,
        cause=RAISED,
        where="rank 1, step 3",
        words=("rank 1", "ValueError"),
        code=(PARSE if launch == "deepspeed" else "") + RAISES.replace("STAGE", str(stage)),
    )


def dying(name: str, how: str, cause: str, words: tuple[str, ...], launch: str = "torchrun", ranks: int = 2) -> Case:
    code = (PARSE if launch == "deepspeed" else "") + DIES.replace("HOW", how)
    answer = {"name": name, "category": "signal", "cause": cause, "words": words, "where": "rank 1, step 3"}
    return Case(launch=launch, ranks=ranks, code=code, **answer)  # type: ignore[arg-type]


KILLED = "rank 1 was killed with SIGKILL (as the kernel does when the memory is full)"
TERMINATE = """import subprocess
        code = '#include <stdexcept>\\\\n#include <thread>\\\\nextern "C" void work() { std::thread t([] {'
        code += ' throw std::runtime_error("tile index out of range"); }); t.join(); }'
        open("fault.cpp", "w").write(code.replace(chr(92) + "n", chr(10)))
        subprocess.run(["g++", "-shared", "-fPIC", "-pthread", "-o", "fault.so", "fault.cpp"], check=True)
        import ctypes
        ctypes.CDLL("./fault.so").work()"""

RANKS = (
    raising("torchrun", "torchrun"),
    raising("torchrun-stage-3", "torchrun", stage=3, ranks=3),
    raising("tee", "tee", ranks=3),
    raising("log-dir", "log-dir"),
    raising("deepspeed", "deepspeed", stage=3),
    raising("srun", "srun", ranks=3),
    raising("accelerate", "accelerate"),
    dying("killed-torchrun", "os.kill(os.getpid(), signal.SIGKILL)", KILLED, ("memory", "-9")),
    dying("killed-deepspeed", "os.kill(os.getpid(), signal.SIGKILL)", KILLED, ("memory", "-9"), launch="deepspeed"),
    dying("killed-tee", "os.kill(os.getpid(), signal.SIGKILL)", KILLED, ("memory", "-9"), launch="tee", ranks=3),
    dying("killed-srun", "os.kill(os.getpid(), signal.SIGKILL)", KILLED, ("memory", "SIGKILL"), launch="srun"),
    dying(
        "segmentation-fault",
        "import ctypes; ctypes.string_at(0)",
        "rank 1 died of a segmentation fault",
        ("segmentation", "-11"),
    ),
    dying(
        "segmentation-fault-deepspeed",
        "import ctypes; ctypes.string_at(0)",
        "rank 1 died of a segmentation fault",
        ("segmentation", "-11"),
        launch="deepspeed",
    ),
    dying("bus-error", "os.kill(os.getpid(), signal.SIGBUS)", "rank 1 died of a bus error (SIGBUS)", ("SIGBUS", "-7")),
    dying(
        "bus-error-deepspeed",
        "os.kill(os.getpid(), signal.SIGBUS)",
        "rank 1 died of a bus error (SIGBUS)",
        ("SIGBUS", "-7"),
        launch="deepspeed",
    ),
    dying(
        "terminated", "os.kill(os.getpid(), signal.SIGTERM)", "rank 1 was ended with SIGTERM from outside", ("SIGTERM",)
    ),
    dying("exits-silently", "os._exit(1)", "rank 1 left with status 1 and said nothing", ("rank 1", "exit")),
    dying("exits-zero", "sys.exit(0)", "rank 1 ended early, with status 0, while the others go on", ("rank 1",)),
    dying(
        "terminate-called",
        TERMINATE,
        "a C++ exception (tile index out of range) ended rank 1: std::terminate, SIGABRT",
        ("C++", "-6"),
    ),
    dying("abort", "os.abort()", "rank 1 aborted (SIGABRT) without a message", ("SIGABRT", "-6"), launch="tee"),
    Case(
        name="abort-at-exit",
        category="signal",
        launch="accelerate",
        where="rank 1, behind the last step",
        cause="all steps are done; at the end a rank aborts: its process group was not destroyed (not in every run)",
        words=("destroy_process_group",),
        code='import warnings\n\nwarnings.simplefilter("always")\ntrain(start(stage=2), 6)\n',
    ),
    Case(
        name="scheduler-stops-all",
        category="signal",
        cause="the scheduler (or the user) ended the whole job with SIGTERM: nothing in the run itself failed",
        words=("SIGTERM",),
        code="import signal\n\n\ndef ends(step):\n    if RANK == 0 and step == 4:\n"
        "        os.kill(os.getppid(), signal.SIGTERM)\n        time.sleep(5)\n\n\nengine = start(stage=2)\n"
        "train(engine, 6, ends)\n",
    ),
    Case(
        name="interrupted",
        category="signal",
        cause="somebody pressed Ctrl-C",
        words=("Ctrl-C",),
        code="import signal\n\n\ndef ends(step):\n    if RANK == 0 and step == 4:\n        os.killpg(0, signal.SIGINT)\n"
        "        time.sleep(5)\n\n\nengine = start(stage=2)\ntrain(engine, 6, ends)\n",
    ),
    Case(
        name="mismatched-sizes",
        category="ranks",
        where="rank 1 sends 64 elements, rank 0 128",
        cause="the ranks call all_reduce with tensors of different size",
        words=("size", "rank"),
        code='deepspeed.init_distributed("gloo")\ntensor = torch.ones(128 if RANK == 0 else 64)\n'
        "dist.all_reduce(tensor)\nprint(tensor.sum())\n",
    ),
    Case(
        name="mismatched-collectives",
        category="ranks",
        cause="the ranks call different collectives at the same time (all_reduce against broadcast)",
        words=("collective", "different"),
        code=TIMEOUT
        + """\
tensor = torch.ones(4096)
if RANK == 0:
    dist.all_reduce(tensor)
else:
    dist.all_gather([torch.ones(16), torch.ones(16)], torch.ones(16))
dist.barrier()
""",
    ),
    Case(
        name="mismatch-debug-detail",
        category="ranks",
        environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        cause="the ranks call different collectives at the same time; TORCH_DISTRIBUTED_DEBUG=DETAIL says which",
        words=("collective", "different"),
        code=TIMEOUT
        + "tensor = torch.ones(64)\nif RANK == 0:\n    dist.all_reduce(tensor)\nelse:\n    dist.broadcast(tensor, 0)\n",
    ),
    Case(
        name="late-rank-timeout",
        category="hang",
        where="rank 1, in front of step 3",
        cause="rank 1 came too late to a collective (it was busy for longer than the timeout)",
        words=("timeout", "rank 1"),
        code=TIMEOUT + "\n\ndef slow(step):\n    if RANK == 1 and step == 3:\n        time.sleep(25)\n\n\n"
        "engine = start(stage=3)\ntrain(engine, 4, slow)\n",
    ),
    Case(
        name="late-rank-timeout-tee",
        category="hang",
        launch="tee",
        ranks=3,
        where="rank 1, in front of step 3",
        cause="rank 1 came too late to a collective (it was busy for longer than the timeout)",
        words=("timeout", "rank 1"),
        code=TIMEOUT + "\n\ndef slow(step):\n    if RANK == 1 and step == 3:\n        time.sleep(25)\n\n\n"
        "engine = start(stage=3)\ntrain(engine, 4, slow)\n",
    ),
    Case(
        name="uneven-data",
        category="hang",
        where="rank 1 has two batches fewer",
        cause="rank 1 ran out of data earlier than rank 0, which waits for it",
        words=("data", "rank"),
        code=TIMEOUT + "engine = start(stage=2)\ntrain(engine, 4 if RANK == 0 else 2)\n"
        'print("rank", RANK, "has seen all its batches", flush=True)\n'
        "if RANK == 1:\n    time.sleep(25)\n",
    ),
    Case(
        name="monitored-barrier",
        category="hang",
        where="rank 1",
        cause="rank 1 did not reach the barrier in time",
        words=("rank 1", "barrier"),
        code='from datetime import timedelta\n\ndeepspeed.init_distributed("gloo")\nif RANK == 1:\n    time.sleep(15)\n'
        "dist.monitored_barrier(timeout=timedelta(seconds=6))\n",
    ),
    Case(
        name="rank-never-comes",
        category="hang",
        launch="plain",
        ranks=1,
        environment={
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29873",
        },
        cause="one of two ranks never came to the rendezvous",
        words=("1/2", "rank"),
        code='from datetime import timedelta\n\ndeepspeed.init_distributed("gloo", timeout=timedelta(seconds=8))\n',
    ),
    Case(
        name="master-does-not-answer",
        category="launch",
        launch="plain",
        ranks=1,
        environment={
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29874",
        },
        cause="nobody listens at the master's address and port: rank 0 did not start, or the address is wrong",
        words=("MASTER_ADDR",),
        code='from datetime import timedelta\n\ndeepspeed.init_distributed("gloo", timeout=timedelta(seconds=8))\n',
    ),
    Case(
        name="master-name-unknown",
        category="launch",
        launch="plain",
        ranks=1,
        environment={
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "gpu-head.invalid",
            "MASTER_PORT": "29874",
        },
        cause="the master's host name cannot be resolved",
        words=("MASTER_ADDR", "resolve"),
        code='from datetime import timedelta\n\ndeepspeed.init_distributed("gloo", timeout=timedelta(seconds=8))\n',
    ),
    Case(
        name="port-in-use",
        category="launch",
        launch="plain",
        ranks=1,
        environment={
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29875",
        },
        cause="port 29875 is taken by another process",
        words=("29875",),
        code='import socket\n\nother = socket.create_server(("0.0.0.0", 29875))\ndeepspeed.init_distributed("gloo")\n',
    ),
    Case(
        name="port-in-use-torchrun",
        category="launch",
        launch="plain",
        ranks=1,
        whole=True,
        cause="port 29876 is taken by another process",
        words=("29876",),
        code="""\
import socket
import subprocess
import sys

other = socket.create_server(("0.0.0.0", 29876))
command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29876", "-m", "timeit"]
raise SystemExit(subprocess.call(command))
""",
    ),
    Case(
        name="store-key-never-set",
        category="hang",
        cause="rank 1 never came to the barrier of the store; rank 0 waited for it until the timeout",
        words=("store", "rank"),
        code="""\
from datetime import timedelta

deepspeed.init_distributed("gloo")
store = dist.distributed_c10d._get_default_store()
store.set_timeout(timedelta(seconds=6))
if RANK == 0:
    store.wait(["data-prepared-by-rank-1"])
else:
    time.sleep(12)
""",
    ),
    Case(
        name="data-worker-killed",
        category="memory",
        where="a DataLoader worker of rank 0",
        cause="a DataLoader worker process was killed with SIGKILL (as the kernel does when the memory is full)",
        words=("DataLoader", "memory"),
        code="""\
import signal


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        if RANK == 0 and index == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(32)


engine = start(stage=2)
for step, x in enumerate(torch.utils.data.DataLoader(Images(), batch_size=2, num_workers=2)):
    loss = engine(x.bfloat16())
    engine.backward(loss)
    engine.step()
    print(f"rank {RANK} step {step} loss {loss.item():.4f}", flush=True)
""",
    ),
    Case(
        name="data-worker-raises",
        category="data",
        where="a DataLoader worker process",
        cause="the data set raised KeyError 'labels' in a DataLoader worker",
        words=("labels", "KeyError"),
        code="""\
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = {"input": torch.randn(32)}
        return row["labels"] if index == 9 else row["input"]


engine = start(stage=2)
for step, x in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2)):
    loss = engine(x.bfloat16())
    engine.backward(loss)
    engine.step()
""",
    ),
)
