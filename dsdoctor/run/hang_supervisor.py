"""The supervisor's process: started by a rank with an order, in Python's isolated mode, without site-packages' start files.

It makes itself nobody's child, keeps of the launcher's streams only stderr, and prints into those of a rank when there is
something to say."""

import json
import os
import signal
import sys


def main() -> None:
    """Leave the rank that started it, then watch."""
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.argv[1])
    sys.path += sys.argv[2:]
    sys.argv[1:] = []
    from dsdoctor.run.hang_report import watch_node

    watch_node(order)


if __name__ == "__main__":
    main()
