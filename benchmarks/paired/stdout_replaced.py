import contextlib
import io
import os
import sys


class Tee:
    def __init__(self, *files):
        self.files = files

    def write(self, text):
        for file in self.files:
            file.write(text)

    def flush(self):
        for file in self.files:
            file.flush()


log = open("log.txt", "w")
sys.stdout = Tee(sys.stdout, log)
print("to both")
with contextlib.redirect_stdout(io.StringIO()) as held, contextlib.redirect_stderr(io.StringIO()) as errors:
    print("held")
    print("error", file=sys.stderr)
print(repr(held.getvalue()), repr(errors.getvalue()))
sys.stderr = Tee(sys.stderr, log)
print("an error", file=sys.stderr)
sys.stdout.flush()
saved = os.dup(2)
os.dup2(os.open("stderr.txt", os.O_CREAT | os.O_WRONLY), 2)
os.write(2, b"to the file\n")
if "--fail" in sys.argv:
    raise ValueError("on purpose")
os.dup2(saved, 2)
sys.stderr = None
