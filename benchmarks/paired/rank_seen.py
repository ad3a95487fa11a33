"""What a rank sees of its process once it has a process group and has made a few collectives."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import torch
import torch.distributed as dist


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(f"{os.environ['RANK']} {' '.join(map(str, words))}\n")
    sys.stdout.flush()


before = {name: getattr(dist, name) for name in dir(dist) if callable(getattr(dist, name))}
dist.init_process_group("gloo")
x = torch.ones(3) * dist.get_rank()
for _ in range(3):
    dist.all_reduce(x)
time.sleep(3)
say("changed", [name for name, value in before.items() if getattr(dist, name) is not value])
say("init", dist.init_process_group.__name__, dist.init_process_group.__module__, dist.init_process_group.__qualname__)
say("hooks", sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__)
say("unraisable", sys.unraisablehook is sys.__unraisablehook__, sys.gettrace(), sys.getprofile(), threading._trace_hook)
say("threads", [each.name for each in threading.enumerate()], threading.active_count())
say(
    "handlers",
    [(int(each), str(signal.getsignal(each))[:40]) for each in (1, 2, 10, 12, 15, 17)],
    signal.set_wakeup_fd(-1),
)
with open("/proc/self/status") as status:
    say("signals", [line.strip() for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))])
try:
    say("children", os.waitpid(-1, os.WNOHANG))
except ChildProcessError as error:
    say("children", error)
say("run", subprocess.run(["true"]).returncode)
say("descriptors", sum(os.path.exists(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")))
say("collector", gc.isenabled(), gc.get_threshold(), len(gc.callbacks), gc.get_freeze_count())
say(
    "warnings",
    len(warnings.filters),
    logging.root.handlers,
    logging.root.level,
    sys.getrecursionlimit(),
    sys.getswitchinterval(),
)
say("torch", torch.get_num_threads(), torch.is_anomaly_enabled(), torch.rand(1).item() >= 0, x.tolist())
say("flight", sorted(name for name in os.environ if name.startswith(("TORCH_FR", "TORCH_NCCL"))))
say("dynamo", "torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
say("folder", sorted(name for name in os.listdir() if not name.startswith("dsdoctor-hang")), os.umask(0o22))
dist.barrier()
dist.destroy_process_group()
say("after", [each.name for each in threading.enumerate()])
