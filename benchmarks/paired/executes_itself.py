import os
import subprocess
import sys

if "again" not in sys.argv:
    done = subprocess.run([sys.executable, *sys.argv, "again", "as a child"], capture_output=True, text=True)
    print("child:", done.returncode, done.stdout, done.stderr)
    sys.stdout.flush()
    os.execv(
        sys.executable,
        [sys.executable, *sys.orig_argv[1:], "again"] if "orig" in sys.argv else [sys.executable, *sys.argv, "again"],
    )
print(sys.argv, __name__, os.path.basename(__file__))
