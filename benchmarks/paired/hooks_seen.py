import builtins
import faulthandler
import gc
import linecache
import locale
import logging
import os
import random
import sys
import threading
import tracemalloc
import warnings

print(sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__)
print(sys.displayhook is sys.__displayhook__, sys.breakpointhook is sys.__breakpointhook__)
print(threading.excepthook is threading.__excepthook__, sys.gettrace(), sys.getprofile(), threading._trace_hook)
print(gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks), gc.get_freeze_count())
print(
    len(warnings.filters),
    warnings.filters[:3],
    warnings.showwarning.__module__,
    logging.root.handlers,
    logging.root.level,
)
print(sys.getrecursionlimit(), sys.getswitchinterval(), faulthandler.is_enabled(), tracemalloc.is_tracing())
print(
    sys.stdin.fileno(), sys.stdout.line_buffering, sys.stdout.encoding, sys.stderr.errors, sys.stdout is sys.__stdout__
)
print([type(each).__name__ for each in sys.path_hooks], locale.getlocale(), os.umask(0o22), sys.dont_write_bytecode)
print([getattr(each, "__name__", type(each).__name__) for each in sys.meta_path])
print(
    builtins.__import__,
    builtins.open.__module__,
    builtins.print,
    sorted(set(vars(builtins)) - {"_", "__build_class__"})[:3],
)
print(random.getstate()[0], sys.asyncio_hooks if hasattr(sys, "asyncio_hooks") else "", sys.getallocatedblocks() > 0)
print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), os.getpgid(0) == os.getpid(), os.getsid(0) > 0)
print(linecache.checkcache.__module__, os.fork, os._exit, os.kill, sys.exit, threading.Thread.start)
print(threading.Thread.run.__module__, os.register_at_fork)
