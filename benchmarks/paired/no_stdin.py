import os
import sys

print(sys.stdin, sys.stderr and sys.stderr.name, flush=True)
with open("file.txt", "w") as file:
    print(file.fileno(), file=file)
print(open("file.txt").read())
if "--fail" in sys.argv:
    raise ValueError("on purpose")
os.write(1, b"written\n")
