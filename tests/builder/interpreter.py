#!/usr/bin/env python3
"""Plays the interpreter of an environment with torch and DeepSpeed: compiles with the machine's real gcc.

The tests' source tree holds one C file an op; what a child script would do with torch is done here without it.
"""

import json
import os
import pathlib
import shlex
import sys
import zipfile

script, arguments = pathlib.Path(sys.argv[1]).name, sys.argv[2:]


def ask_commands(ops):
    for op, architectures in json.loads(ops):
        if op == "refused":
            print("DSDOCTOR " + json.dumps({"op": op, "error": "its probe declines it"}))
            continue
        if op == "deadly":
            sys.exit("its builder ends the process")
        place = pathlib.Path("build/dsdoctor") / op
        named = "misnamed" if os.environ.get("LIES") == "missing" else f"{op}_op"
        target = place / "lib" / "deepspeed" / "ops" / f"{named}.cpython-311-x86_64-linux-gnu.so"
        object_file, source = place / "temp" / f"{op}.o", f"csrc/{op}.c"
        flags = shlex.split(os.environ.get("CFLAGS", ""))  # as setuptools reads them
        compiling = [os.environ["CC"], "-fPIC", "-g", f"-I{pathlib.Path.cwd()}/csrc", *flags]
        compiling += ["-c", source, "-o", object_file]
        linking = [os.environ["CC"], "-shared", object_file, "-o", target]
        answer = {"op": op, "compile": [list(map(str, compiling))], "link": [list(map(str, linking))], "forgotten": []}
        print(f"said of {op}: arch={architectures or 'none'}, {os.environ.get('CFLAGS')}")
        print("probe.c:1:10: fatal error: numa.h: No such file or directory")
        print("DSDOCTOR " + json.dumps(answer))


def bdist_wheel():
    if os.environ.get("PYTHONSAFEPATH"):
        sys.exit("ModuleNotFoundError: No module named 'op_builder'")
    local = pathlib.Path("build.txt").read_text()
    packed = pathlib.Path(arguments[arguments.index("--dist-dir") + 1])
    packed.mkdir()
    lies = os.environ.get("LIES", "")
    print(f"packing, with CFLAGS={os.environ.get('CFLAGS')!r} by the index {os.environ.get('PIP_INDEX_URL')}")
    ops = {name[9:].lower(): 1 for name in os.environ if name.startswith("DS_BUILD_") and name[9:] != "OPS"}
    with zipfile.ZipFile(packed / f"deepspeed-1.0{local}-cp311-cp311-linux_x86_64.whl", "w") as wheel:
        claims = {} if lies == "unclaimed" else ops
        wheel.writestr("deepspeed/git_version_info_installed.py", f"version='1.0{local}'\ninstalled_ops={claims}\n")
        inside = f"deepspeed-1.0{local}.dist-info"
        wheel.writestr(f"{inside}/METADATA", f"Name: deepspeed\nVersion: 1.0{local}\n")
        wheel.writestr(f"{inside}/RECORD", f"{inside}/RECORD,,\n")


def load_ops(pairs):
    failing = os.environ.get("LIES") == "unloadable"
    print("DSDOCTOR " + json.dumps({op: "undefined symbol: x" if failing else None for op, _ in json.loads(pairs)}))


{"ask_commands.py": ask_commands, "setup.py": lambda *_: bdist_wheel(), "load_ops.py": load_ops}[script](*arguments)
