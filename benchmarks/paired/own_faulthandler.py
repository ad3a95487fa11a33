import faulthandler
import signal
import sys
import time

faulthandler.enable(file=open("fault.txt", "w"))
faulthandler.register(signal.SIGUSR2, file=sys.stdout, all_threads=False)
faulthandler.dump_traceback_later(1, exit="--exit" in sys.argv, file=sys.stdout)


def waits():
    signal.raise_signal(signal.SIGUSR2)
    time.sleep(2)


waits()
faulthandler.cancel_dump_traceback_later()
print(faulthandler.is_enabled())
