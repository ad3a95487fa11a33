"""What a script sees of how it was started."""

import os
import sys

import __main__

SIZE: int = 3


class Here:
    pass


print(sys.argv, __name__, __file__, __package__, __doc__, __spec__ and (__spec__.name, __spec__.origin))
print([name for name in vars() if name not in ("__cached__",)], type(__loader__).__name__, __annotations__)
print(sys.path[0], os.getcwd(), os.environ.get("PWD"), sys.warnoptions, sys._xoptions)
for name in dir(sys.flags):
    if not name.startswith(("_", "n_")):
        print("flag", name, getattr(sys.flags, name))
print(__main__ is sys.modules["__main__"], __main__.Here is Here, Here.__module__, Here.__qualname__, Here)
print("user_came" in vars(sys) and sys.user_came, "sitecustomize" in sys.modules)
frame, depth = sys._getframe(), 0
while frame := frame.f_back:
    depth += 1
print("frames below:", depth)
for name in sorted(set(os.environ) - {"_"}):
    print("env", name, os.environ[name])
if __name__ == "__main__":
    print("main")
