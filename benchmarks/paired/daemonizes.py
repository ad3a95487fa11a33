import os
import sys
import time

pid = os.fork()
if pid:
    os.waitpid(pid, 0)
    while not os.path.exists("daemon.txt"):
        time.sleep(0.05)
    print(open("daemon.txt").read())
    sys.exit(0)
os.setsid()
if os.fork():
    os._exit(0)
with open("daemon.part", "w") as file:
    file.write(f"{len(os.listdir('/proc/self/task'))} {os.getsid(0) != os.getpid()}")
os.rename("daemon.part", "daemon.txt")
