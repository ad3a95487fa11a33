"""A tracer that nobody takes away, as coverage's: what runs under it at the end."""

import atexit
import sys

seen = set()
sys.settrace(lambda frame, event, arg: seen.add(frame.f_code.co_filename))
atexit.register(
    lambda: print("traced:", sorted(name.rsplit("/", 1)[-1] for name in seen if "/lib/python" not in name), flush=True)
)


def work():
    return 1


work()
