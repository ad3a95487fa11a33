"""Plays the interpreter of an environment whose torch and whose only op stand in the file TORCH beside it.

It says what it holds; the building is ``player.py``'s, one folder up, which is ``tests/builder/interpreter.py``.
"""

import json
import os
import pathlib
import runpy
import sys
import time

here, script = pathlib.Path(sys.argv[0]).parent, pathlib.Path(sys.argv[1]).name
release, op = (here / "TORCH").read_text().split()
torch = here / "torch"


def answer(**facts):
    print("DSDOCTOR " + json.dumps(facts))


def ask_python():
    torch.mkdir(exist_ok=True)
    (torch / "version.py").write_text(f"__version__ = '{release}'\ncuda = None\nhip = None\n")
    python = {"executable": sys.argv[0], "version": "3.11.7", "tag": "cp311", "platform": "linux-x86_64", "site": []}
    python |= {"include": str(here), "headers": True, "scripts": str(here), "packages": {"setuptools": "84.2.1"}}
    answer(python=python, torch=str(torch), torch_lacks=[], deepspeed=None, cutlass=None)


def ask_ops():
    fact = {"op": op, "variable": f"DS_BUILD_{op.upper()}", "module": f"deepspeed.ops.{op}_op", "sources": [f"{op}.c"]}
    answer(accelerator="cpu", ops=[fact])


def build():
    (here / "building").write_text(str(os.getpid()))
    while op == "slow":
        time.sleep(1)
    runpy.run_path(str(here.parent / "player.py"))


answers = {"ask_python.py": ask_python, "ask_ops.py": ask_ops, "ask_torch.py": lambda: answer(arch_list=[])}
answers.get(script, build)()
