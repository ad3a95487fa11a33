"""Children by fork, spawn and forkserver, with a function and a class of __main__."""

import concurrent.futures
import multiprocessing
import os
import sys
import threading


class Task:
    def __init__(self, n):
        self.n = n


def square(task):
    return task.n**2, __name__, multiprocessing.current_process().name, threading.active_count()


def child(queue):
    names = sorted(name for name in sys.modules if name.startswith("dsdoctor"))
    queue.put((__name__, names, sys.argv, len(os.listdir("/proc/self/task")), os.path.basename(__file__)))


if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        name, ours, argv, tasks, file = queue.get()
        process.join()
        print(method, name, argv, file, process.exitcode, tasks if method != "fork" else "")
        if method != "fork":
            print("modules of the watch in the child:", ours)
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            print(method, list(pool.map(square, [Task(2), Task(3)]))[0][:2])
    bad = multiprocessing.get_context("spawn").Process(target=sys.exit, args=(3,))
    bad.start()
    bad.join()
    print(bad.exitcode)
