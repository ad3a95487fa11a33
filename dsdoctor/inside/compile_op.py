"""Compile one op of the DeepSpeed source tree in the current folder. Arguments: op, build folder, "ninja" or "serial", and as JSON
what to change of its builder's flags: "processor", the -march and SIMD macro for its own (none: as they are), "debug_info".

The extension comes from the op's own builder and is compiled by the accelerator's own build_ext, as in DeepSpeed's
setup.py, but alone: no other op's probe runs, no object folder is shared and no architecture list leaks.
"""

import json
import os
import sys

name, folder, how = sys.argv[1:4]
changes = json.loads(sys.argv[4])
SIMD = ("-D__AVX512__", "-D__AVX256__", "-D__SVE__", "-D__NEON__", "-D__SCALAR__")


def changed(flags):
    """The flags of C++ files as they are to be. What gcc was told stays readable in the file, also without debug information."""
    march, simd = changes["processor"] or (None, None)
    flags = [march if march and flag in ("-march=native", "-mcpu=native") else flag for flag in flags]
    flags = [simd if simd and flag in SIMD else flag for flag in flags]
    return (
        flags if changes["debug_info"] else [flag for flag in flags if flag != "-g"] + ["-g0", "-frecord-gcc-switches"]
    )


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
before = extension.extra_compile_args["cxx"]
extension.extra_compile_args["cxx"] = changed(before)
if before != extension.extra_compile_args["cxx"]:
    print("dsdoctor: flags of %s: %s -> %s" % (name, " ".join(before), " ".join(changed(before))), flush=True)
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
