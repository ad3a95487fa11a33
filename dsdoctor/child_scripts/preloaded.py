"""Import torch once, then run scripts of this folder in processes forked from this one: each line of stdin asks for one.

A line is a JSON object: the script, its arguments, the folder and the whole environment that it runs in. What it prints goes to
our stdout; a line of its own with its exit status follows. The end of stdin is the end of this process.
"""

import json
import os
import runpy
import sys
import traceback
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch  # noqa: F401

HERE = os.path.dirname(os.path.abspath(__file__))


def run(question):
    """The exit status of a script, as the interpreter would end with."""
    script = os.path.join(HERE, os.path.basename(question["script"]))
    os.environ.clear()
    os.environ.update(question["env"])
    sys.argv[:] = [script, *question["arguments"]]
    if sys.path[:1] != [HERE]:
        sys.path.insert(0, HERE)
    try:
        os.chdir(question["folder"])
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        # 70: what is at an end here without having had a status
        status = 70
        try:
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
            status = run(json.loads(line))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    print("\nDSDOCTOR-ENDED %d" % os.waitstatus_to_exitcode(ended), flush=True)
