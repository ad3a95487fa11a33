"""The C extension, the address of the pages, and what pyproject.toml cannot say of them. All else about the package stands there.

The extension is optional: without a compiler or Python.h the install goes on, and the overflow hooks measure with torch.
"""

import os
import re
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# one binary for every Python from 3.10 on; a free-threaded Python has no limited API
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")
SCAN = Extension(
    "dsdoctor.overflow.measure._scan",
    ["dsdoctor/overflow/measure/scan.c"],
    extra_compile_args=["-O3", "-g0"],
    py_limited_api=STABLE,
    optional=True,
)
PAGES = os.environ.get("DSDOCTOR_PAGES", "")


class WithAddress(build_py):
    """Whoever publishes the pages names their address in DSDOCTOR_PAGES; without it the package knows none."""

    def run(self):
        super().run()
        if PAGES and not self.editable_mode:
            place = Path(self.build_lib, "dsdoctor", "core", "release.py")
            text = place.read_text(encoding="utf-8")
            place.write_text(text.replace('\nADDRESS = ""\n', f'\nADDRESS = "{PAGES}"\n', 1), encoding="utf-8")


if PAGES and not re.fullmatch(r"https://[\w.-]+(/[\w.~-]+)*/", PAGES):
    raise SystemExit(f"DSDOCTOR_PAGES is {PAGES!r}; the address of the pages begins with https:// and ends with /")
setup(
    ext_modules=[SCAN],
    cmdclass={"build_py": WithAddress},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {},
)
