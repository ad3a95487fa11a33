"""``python -m dsdoctor``: the command line."""

import os
import sys


def _leave_current_folder() -> None:
    """`-m` put the current folder first: a json.py that lies there is anybody's, and no module of ours. One that PYTHONPATH names
    stays."""
    try:
        here = os.getcwd()  # noqa: PTH109 - what is imported from now on may lie there
    except OSError:
        return
    named = [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]  # noqa: PTH100
    if sys.path[0] in {"", here} and (here not in named or sys.path.count(here) > 1):
        del sys.path[0]


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        _leave_current_folder()
    from dsdoctor.cli import main

    main()
