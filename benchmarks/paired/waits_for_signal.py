"""waits_for_signal.py [own]: the signal that comes from outside, with and without a handler."""

import signal
import sys
import time


def own(number, frame):
    print("own handler", number, frame.f_code.co_name, flush=True)
    sys.exit(9)


if "own" in sys.argv:
    for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
        signal.signal(each, own)


def main():
    print("ready", flush=True)
    time.sleep(30)
    print("nothing came", flush=True)


main()
