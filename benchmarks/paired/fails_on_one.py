"""One rank of two raises, or is ended: fails_on_one.py KIND."""

import os
import signal
import sys
import time

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


@record
def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        if sys.argv[1] == "raises":
            raise ValueError("on purpose")
        if sys.argv[1] == "exits":
            sys.exit(5)
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    say("waits")
    time.sleep(60)


main()
