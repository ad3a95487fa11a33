import atexit
import sys
import threading
import weakref


class Gone:
    def __del__(self):
        sys.__stdout__.write(f"del {self.name}\n")


def with_name(name):
    made = Gone()
    made.name = name
    return made


atexit.register(print, "first registered")
kept = with_name("global")
weakref.finalize(kept, print, "finalized")
atexit.register(print, "second registered")
threading._register_atexit(print, "threads shut down")
in_cycle = with_name("cycle")
in_cycle.me = in_cycle
sys.modules["kept_there"] = with_name("in modules")
print("end of the script")
