"""The C extension, the address of the pages, what is derived from the book of rules. pyproject.toml has all else about the package.

The extension is optional: without a compiler or Python.h the install goes on, and the overflow hooks measure with torch.
"""

import os
import re
import sys
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


class WithDerived(build_py):
    """Whoever publishes the pages names their address in DSDOCTOR_PAGES; without it the package knows none.

    The table of log rules and the index of all rules are made here; an editable install makes them when they are first needed.
    """

    def run(self):
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "dsdoctor")
        if PAGES:
            place = package / "core" / "release.py"
            text = place.read_text(encoding="utf-8")
            place.write_text(text.replace('\nADDRESS = ""\n', f'\nADDRESS = "{PAGES}"\n', 1), encoding="utf-8")
        sys.path.insert(0, str(Path(__file__).parent))
        from dsdoctor.rules.store import write_all

        write_all(package / "rules")


if PAGES and not re.fullmatch(r"https://[\w.-]+(/[\w.~-]+)*/", PAGES):
    raise SystemExit(f"DSDOCTOR_PAGES is {PAGES!r}; the address of the pages begins with https:// and ends with /")
setup(
    ext_modules=[SCAN],
    cmdclass={"build_py": WithDerived},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {},
)
