"""Python imports this at its start, because `python -m dsdoctor.run` put this folder on PYTHONPATH.

It takes itself away, readies this process, and gives way to the environment's own sitecustomize. Other Pythons that the
script starts come by here too, of any release: no annotations, no new syntax, and never a failure.
"""
# mypy: ignore-errors

import os
import sys

here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would cost every child 10 ms
sys.path[:] = [folder for folder in sys.path if folder != here]
# not by sys.path: the script's environment may hold another dsdoctor, or none
try:
    import json

    order = json.loads(os.environ.get("DSDOCTOR_RUN", "{}"))
    if order.get("python") == "%s %s" % (sys.prefix, sys.hexversion):  # noqa: UP031
        from importlib.machinery import PathFinder
        from importlib.util import module_from_spec

        package = os.path.dirname(os.path.dirname(here))  # noqa: PTH120
        spec = PathFinder.find_spec("dsdoctor", [os.path.dirname(package)])  # noqa: PTH120
        sys.modules["dsdoctor"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["dsdoctor"])
        from dsdoctor.run.script import ready

        ready(order)
except Exception:  # whatever it is: the script runs without us
    try:
        # a stderr may be none, closed or broken; and this is read before dsdoctor can be imported
        os.write(2, ("dsdoctor: could not start: %s\n" % (sys.exc_info()[1],)).encode("utf-8", "backslashreplace"))  # noqa: UP031
    except OSError:
        order = None
# where there is none, the import error that says so is what `site` expects
del sys.modules["sitecustomize"]
import sitecustomize  # noqa: E402, F401
