"""The torch of this interpreter, as the file that says it does: torch is not imported. Its own words are checked by others."""

import importlib.util
import json
import os
import runpy

spec = importlib.util.find_spec("torch")
facts = runpy.run_path(os.path.join(os.path.dirname(spec.origin), "version.py")) if spec and spec.origin else {}
release = {"version": facts.get("__version__"), "cuda": facts.get("cuda"), "hip": facts.get("hip")}
print("DSDOCTOR " + json.dumps(release))
