"""The torch of this interpreter, as the file that says it does: torch is not imported. Its own words are checked by others."""

import importlib.util
import json
import os
import runpy

spec = importlib.util.find_spec("torch")
said = runpy.run_path(os.path.join(os.path.dirname(spec.origin), "version.py")) if spec and spec.origin else {}
release = {"version": said.get("__version__"), "cuda": said.get("cuda"), "hip": said.get("hip")}
print("DSDOCTOR " + json.dumps(release))
