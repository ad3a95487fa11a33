import multiprocessing
import os
import threading

print(
    threading.active_count(),
    [t.name for t in threading.enumerate()],
    threading.main_thread() is threading.current_thread(),
)
print("tasks", len(os.listdir("/proc/self/task")))
print(
    multiprocessing.active_children(),
    multiprocessing.current_process(),
    multiprocessing.get_start_method(allow_none=True),
)
worker = threading.Thread(target=print, args=("in a thread",))
worker.start()
worker.join()
print(worker.name, threading.get_native_id() == os.getpid())
