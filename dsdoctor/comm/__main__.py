"""``python -m dsdoctor.comm``: the command ``comm``, under a launcher or by itself."""

import runpy
import sys

if __name__ == "__main__":
    # by name and not by import: this package must not import the command line
    sys.argv[1:1] = ["comm"]
    runpy.run_module("dsdoctor", run_name="__main__")
