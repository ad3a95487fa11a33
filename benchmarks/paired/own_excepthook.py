import sys


def hook(kind, value, trace):
    names = []
    while trace:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    print("hooked", kind.__name__, value, names, flush=True)


def fail():
    raise ValueError("on purpose")


sys.excepthook = hook
fail()
