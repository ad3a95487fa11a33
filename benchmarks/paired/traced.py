import sys
import threading

seen = []


def tracer(frame, event, arg):
    if event == "call":
        seen.append((frame.f_code.co_name, frame.f_code.co_filename.rsplit("/", 1)[-1]))
    return tracer


def work(n):
    return work(n - 1) + 1 if n else 0


threading.settrace(tracer)
sys.settrace(tracer)
work(3)
thread = threading.Thread(target=work, args=(1,))
thread.start()
thread.join()
sys.settrace(None)
print(seen)
profiled = []
sys.setprofile(lambda frame, event, arg: profiled.append((event, frame.f_code.co_name)))
work(2)
sys.setprofile(None)
print(profiled)
