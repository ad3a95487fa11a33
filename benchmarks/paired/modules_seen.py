"""Which modules are there before the script imports any, and whether its own come first."""

import sys

for name in (
    "numpy",
    "torch",
    "deepspeed",
    "packaging",
    "psutil",
    "rich",
    "yaml",
    "transformers",
    "setuptools",
    "pytest",
):
    print(name, name in sys.modules)
import config
import core
import memory
import overflow
import run
import ui

print(config.NAME, core.NAME, memory.NAME, overflow.NAME, run.NAME, ui.NAME)
before = set(sys.modules)
import torch  # noqa: F401

print(len([name for name in set(sys.modules) - before if name.split(".")[0] == "torch"]) > 1000)
