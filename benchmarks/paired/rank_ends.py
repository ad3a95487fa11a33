"""The ends that all ranks make together: rank_ends.py KIND."""

import os
import signal
import sys
import time

import torch.distributed as dist


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def own(number, frame):
    say("own", number, frame.f_code.co_name)


def usr2():
    signal.signal(signal.SIGUSR2, own)
    signal.raise_signal(signal.SIGUSR2)
    time.sleep(1)


def chained_usr1():
    signal.signal(signal.SIGUSR1, own)
    signal.pthread_kill(__import__("threading").main_thread().ident, signal.SIGUSR1)


def waits():
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    say(os.waitstatus_to_exitcode(os.wait()[1]))
    try:
        os.wait()
    except ChildProcessError as error:
        say(error)


def replaced():
    sys.excepthook = lambda kind, value, trace: say("own hook", kind.__name__, value)
    raise ValueError("on purpose")


def thread_raises():
    import threading

    threading.excepthook = lambda args: say("own thread hook", args.exc_type.__name__)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


KINDS = {
    "clean": lambda: None,
    "usr2": usr2,
    "usr1": chained_usr1,
    "waits": waits,
    "number": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(0),
    "replaced": replaced,
    "thread_raises": thread_raises,
    "no_stderr": lambda: os.close(2),
    "closed_stderr": lambda: sys.stderr.close(),
    "moved": lambda: os.chdir("/"),
    "cleared": lambda: os.environ.clear(),
    "no_destroy": lambda: say("no destroy"),
}
dist.init_process_group("gloo")
dist.barrier()
KINDS[sys.argv[1]]()
dist.barrier()
time.sleep(2.5)
if sys.argv[1] != "no_destroy":
    dist.destroy_process_group()
say("end")
