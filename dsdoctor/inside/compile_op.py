"""Compile one op of the DeepSpeed source tree in the current folder. Arguments: op, build folder, "ninja" or "serial".

The extension comes from the op's own builder and is compiled by the accelerator's own build_ext, as in DeepSpeed's
setup.py, but alone: no other op's probe runs, no object folder is shared and no architecture list leaks.
"""

import os
import sys

name, folder, how = sys.argv[1:4]
sys.path[0] = os.getcwd()
from accelerator import get_accelerator  # noqa: E402
from op_builder.all_ops import ALL_OPS  # noqa: E402
from setuptools import setup  # noqa: E402

op = ALL_OPS[name]
if not op.is_compatible(verbose=True):
    sys.exit(f"dsdoctor: error: DeepSpeed's own probe declines {name}: {op.error_log or 'it names no reason'}")
extension = op.builder()
if get_accelerator().device_name() == "cuda" and getattr(op, "build_for_cpu", False):
    sys.exit(f"dsdoctor: error: DeepSpeed fell back to the CPU flavour of {name}: it found no usable nvcc in CUDA_HOME")
# DeepSpeed's CPU builder leaves out what an op links with (async_io: -laio), and the op does not load
forgotten = [flag for flag in op.strip_empty_entries(op.extra_ldflags()) if flag not in extension.extra_link_args]
if forgotten:
    print(f"dsdoctor: linking {name} with {' '.join(forgotten)}, which its builder leaves out", flush=True)
    extension.extra_link_args += forgotten
build_ext = get_accelerator().build_extension().with_options(use_ninja=how == "ninja")
setup(
    name="deepspeed",
    version="0",
    packages=[],
    py_modules=[],
    ext_modules=[extension],
    cmdclass={"build_ext": build_ext},
    script_args=["build_ext", "--build-temp", f"{folder}/temp", "--build-lib", f"{folder}/lib"],
)
