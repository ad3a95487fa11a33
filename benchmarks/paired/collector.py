import gc
import sys
import tracemalloc
import weakref


class Node:
    pass


gc.disable()
events = []
gc.callbacks.append(lambda phase, info: events.append(phase))
node = Node()
node.me = node
seen = weakref.ref(node)
del node
print(seen() is not None, gc.collect() > 0, seen(), events)
for _ in range(100000):
    [].append([])
print(gc.isenabled(), gc.get_count()[0] > 0, events, len(gc.callbacks))
tracemalloc.start()
print(len(bytearray(1 << 20)), tracemalloc.get_traced_memory()[1] > 1 << 20)
tracemalloc.stop()
value = object()
print(sys.getrefcount(value), len(gc.get_referrers(value)))
print(len([each for each in gc.get_objects() if type(each).__name__ == "Node"]))
