import sys
import threading
import time


def fail():
    raise KeyError("in a thread")


def late():
    time.sleep(0.5)
    print("late thread done", flush=True)


if "--own" in sys.argv:
    threading.excepthook = lambda args: print("own", args.exc_type.__name__, args.thread.name, flush=True)
thread = threading.Thread(target=fail, name="worker")
thread.start()
thread.join()
threading.Thread(target=late).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("main ends", flush=True)
