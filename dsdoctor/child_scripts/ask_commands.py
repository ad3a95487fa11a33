"""Print the commands that compile ops of the DeepSpeed source tree in the current folder. Argument: a JSON list of pairs, an op
and its TORCH_CUDA_ARCH_LIST.

Each extension comes from the op's own builder and its commands from the accelerator's own build_ext, as in DeepSpeed's
setup.py, but one op at a time: no other op's probe runs, and no architecture list reaches another op. Nothing is compiled except
what the ops' own probes try. Prints one line for each op.
"""

import json
import os
import sys
from functools import lru_cache

from recorded import commands

sys.dont_write_bytecode = True
sys.path[0] = os.getcwd()
from accelerator import get_accelerator  # noqa: E402
from op_builder.all_ops import ALL_OPS  # noqa: E402

try:
    import cpuinfo
except ImportError:
    # DeepSpeed's builders ask lscpu then
    cpuinfo = None

# a builder asks more than once what the processor is, and py-cpuinfo measures for a second each time
if cpuinfo is not None:
    cpuinfo.get_cpu_info = lru_cache(maxsize=None)(cpuinfo.get_cpu_info)


class CommandsRefused(Exception):
    """Why there are no commands for an op; what was printed before may say more."""


def commands_of(name):
    op = ALL_OPS[name]
    if not op.is_compatible(verbose=True):
        raise CommandsRefused("DeepSpeed's own probe declines %s: %s" % (name, op.error_log or "it names no reason"))
    extension = op.builder()
    if get_accelerator().device_name() == "cuda" and getattr(op, "build_for_cpu", False):
        raise CommandsRefused(
            "DeepSpeed fell back to the CPU flavour of %s: it found no usable nvcc in CUDA_HOME" % name
        )
    # DeepSpeed's CPU builder leaves out what an op links with (async_io: -laio), and the op does not load
    wanted = op.strip_empty_entries(op.extra_ldflags())
    forgotten = [flag for flag in wanted if flag not in extension.extra_link_args]
    extension.extra_link_args += forgotten
    build_ext = get_accelerator().build_extension().with_options(use_ninja=False)
    compiling, linking = commands(build_ext, extension, os.path.join("build", "dsdoctor", name))
    return {"compile": compiling, "link": linking, "forgotten": forgotten}


for name, architectures in json.loads(sys.argv[1]):
    if architectures:
        os.environ["TORCH_CUDA_ARCH_LIST"] = architectures
    answer = {"op": name}
    try:
        answer.update(commands_of(name))
    except CommandsRefused as refusal:
        answer["error"] = str(refusal)
    except (Exception, SystemExit) as wrong:
        answer["error"] = "%s: %s" % (type(wrong).__name__, " ".join(map(str, wrong.args)))
    print("\nDSDOCTOR " + json.dumps(answer), flush=True)
