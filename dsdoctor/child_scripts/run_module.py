"""`run_module.py MODULE ARGUMENT...`: as `python -m MODULE`, which takes modules of the current folder first, whosever they are.

Modules come from where this Python has them; dsdoctor's own, where it has none, from where this file is.
"""

import os
import sys

own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [folder for folder in sys.path if folder not in ("", here)]
if own not in sys.path:
    sys.path.append(own)
del sys.argv[0]

from runpy import run_module  # noqa: E402 - not before the path is one's own

run_module(sys.argv[0], run_name="__main__", alter_sys=True)
