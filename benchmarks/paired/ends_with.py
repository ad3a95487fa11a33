"""The ends that a script can make by itself: ends_with.py KIND."""

import atexit
import os
import resource
import signal
import sys

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
atexit.register(print, "atexit runs", flush=True)


class Own(Exception):
    def __str__(self):
        return "of its own"


def recurse(n):
    return recurse(n + 1)


def deep(n):
    return deep(n - 1) if n else 0


def chained():
    try:
        {}["absent"]
    except KeyError as error:
        raise Own from error


def grouped():
    error = ExceptionGroup("several", [ValueError("one"), TypeError("two")])  # noqa: F821 - Python 3.11
    error.add_note("a note")
    raise error


def fork_exits():
    if os.fork() == 0:
        sys.exit(4)
    print(os.waitstatus_to_exitcode(os.wait()[1]))


def at_exit_fails():
    atexit.register(lambda: 1 / 0)


def segfault():
    import ctypes

    ctypes.string_at(0)


def import_fails():
    import module_that_nobody_has  # noqa: F401


def syntax():
    compile("if x\n", "made_up.py", "exec")


def lost_output():
    sys.stdout.close()


KINDS = {
    "os_exit": lambda: os._exit(7),
    "text": lambda: sys.exit("a text"),
    "number": lambda: sys.exit(3),
    "large_number": lambda: sys.exit(1000),
    "none": lambda: sys.exit(None),
    "tuple": lambda: sys.exit((1, "two")),
    "chained": chained,
    "grouped": grouped,
    "keyboard": lambda: signal.raise_signal(signal.SIGINT),
    "raised_keyboard": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "segfault": segfault,
    "recursion": lambda: recurse(0),
    "deep": lambda: print(deep(sys.getrecursionlimit() - 12)),
    "fork_exits": fork_exits,
    "at_exit_fails": at_exit_fails,
    "import_fails": import_fails,
    "syntax": syntax,
    "lost_output": lost_output,
    "generator_exit": lambda: (_ for _ in ()).throw(GeneratorExit),
    "base": lambda: (_ for _ in ()).throw(BaseException("base")),
    "stop": lambda: next(iter(())),
}
print("before", flush=True)
KINDS[sys.argv[1]]()
print("after", flush=True)
