"""The C extension, and what pyproject.toml cannot say of it. All else about the package stands there.

The extension is optional: without a compiler or Python.h the install goes on, and the overflow hooks measure with torch.
"""

import sysconfig

from setuptools import Extension, setup

# one binary for every Python from 3.10 on; a free-threaded Python has no limited API
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")
SCAN = Extension(
    "dsdoctor.overflow.measure._scan",
    ["dsdoctor/overflow/measure/scan.c"],
    extra_compile_args=["-O3", "-g0"],
    py_limited_api=STABLE,
    optional=True,
)

setup(ext_modules=[SCAN], options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {})
