"""Print the version of this interpreter's torch, from its version.py. torch is not imported; what it states is not checked here."""

import importlib.util
import json
import os
import runpy

spec = importlib.util.find_spec("torch")
facts = runpy.run_path(os.path.join(os.path.dirname(spec.origin), "version.py")) if spec and spec.origin else {}
release = {
    "version": facts.get("__version__"),
    "cuda": facts.get("cuda"),
    "hip": facts.get("hip"),
    "xpu": facts.get("xpu"),
}
print("DSDOCTOR " + json.dumps(release))
