"""Children of the script: none but its own."""

import os
import signal
import subprocess
import sys
import time

ended = []
signal.signal(signal.SIGCHLD, lambda number, frame: ended.append(number))
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError as error:
    print(error)
try:
    import psutil

    print([child.name() for child in psutil.Process().children(recursive=True)])
except ImportError:
    print("no psutil")
print(subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True).stdout)
pid = os.fork()
if pid == 0:
    os._exit(5)
print(os.wait()[0] == pid)
try:
    os.wait()
except ChildProcessError as error:
    print(error)
time.sleep(0.2)
print(len(ended))
