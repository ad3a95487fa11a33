"""Print whether ops would compile, without compiling them. Arguments: "source" or "installed", its folder, a scratch folder,
the number of jobs, then ops.

Each op's own builder gives the commands that setup.py would run. The compile commands run as far as the preprocessor, so
that every header is looked for; the link command runs with empty objects, so that every library is. Prints one line for each op.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from recorded import commands

COMMAND_LIMIT = 300
kind, folder, scratch, jobs, names = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:]
EMPTY = os.path.join(scratch, "empty.o")
sys.dont_write_bytecode = True
if kind == "source":
    os.chdir(folder)
    sys.path[0] = folder
    from accelerator import get_accelerator
    from op_builder.all_ops import ALL_OPS
else:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    os.chdir(os.path.join(folder, "ops"))


class OpRefused(Exception):
    """Why an op cannot be built; what was printed before may say more."""


def failure_of(command):
    """Run a command. Its output, of which the caller takes the first error; None when it succeeds."""
    # a process group, so that its children can be killed with it; not a session, so that it still ends with ours
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, text=True, errors="replace", preexec_fn=os.setpgrp, **pipes)
    try:
        output, _ = process.communicate(timeout=COMMAND_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "error: %s gave no answer within %d s" % (command[0], COMMAND_LIMIT)
    return None if process.returncode == 0 else output[-20000:] or "error: it ended with %d" % process.returncode


def preprocess(command):
    """The compile command, made to run only the preprocessor. nvcc can do that for one architecture only."""
    short, skip, seen = [], False, False
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if skip:
            skip = False
        elif word == "-o":
            short += ["-o", os.devnull]
            skip = True
        elif word == "-gencode" or word.startswith("-gencode="):
            skip = word == "-gencode"
            short += [] if seen else [word, following] if skip else [word]
            seen = True
        elif word.startswith(("--threads", "-MF", "-MMD")):
            skip = word in {"--threads", "-MF"}
        else:
            short.append("-E" if word == "-c" else word)
    return short


def link(command):
    """The link command; the folder of its output is made."""
    target = command[command.index("-o") + 1]
    os.makedirs(os.path.dirname(target), exist_ok=True)
    return command


def judge(name):
    op = ALL_OPS[name]
    if not op.is_compatible(verbose=True):
        raise OpRefused("DeepSpeed's own probe declines it: %s" % (op.error_log or "it names no reason"))
    extension = op.builder()
    if get_accelerator().device_name() == "cuda" and getattr(op, "build_for_cpu", False):
        raise OpRefused("DeepSpeed would build its CPU flavour: it found no usable nvcc in CUDA_HOME")
    place = os.path.join(scratch, name)
    build_ext = get_accelerator().build_extension().with_options(use_ninja=False)
    compile_commands, link_commands = commands(
        build_ext, extension, place, lambda target: shutil.copyfile(EMPTY, target)
    )
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for output in pool.map(lambda command: failure_of(preprocess(command)), compile_commands):
            if output:
                pool.shutdown(cancel_futures=True)
                return output
    for command in link_commands:
        output = failure_of(link(command))
        if output:
            return output
    return None


os.makedirs(scratch, exist_ok=True)
subprocess.run([os.environ.get("CC") or "cc", "-x", "c", "-c", os.devnull, "-o", EMPTY], check=False)
if not os.path.exists(EMPTY):
    open(EMPTY, "w").close()
for name in names:
    error = output = None
    try:
        output = judge(name)
    except OpRefused as refusal:
        error = str(refusal)
    except (Exception, SystemExit) as wrong:
        error = "%s: %s" % (type(wrong).__name__, " ".join(map(str, wrong.args)))
    shutil.rmtree(os.path.join(scratch, name), ignore_errors=True)
    print("\nDSDOCTOR " + json.dumps({"op": name, "error": error, "output": output}), flush=True)
