"""The processor that host code is for, and what a shared object without debug information still tells of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.builder.elf import confess
from dsdoctor.builder.nouns import Wish
from dsdoctor.builder.processor import LEVELS, choose_processor, flags_of
from dsdoctor.errors import UsageError
from dsdoctor.host import INSIDE
from dsdoctor.machine import System
from tests.conftest import machine

ARM = machine(system=System(architecture="aarch64", os="Debian"))


@pytest.mark.parametrize(
    ("asked", "chosen"), [(None, "native"), ("native", "native"), ("v3", "x86-64-v3"), ("x86-64-v4", "x86-64-v4")]
)
def test_a_level_is_taken_by_its_short_name_too(asked: str | None, chosen: str) -> None:
    level, choice = choose_processor(machine(), Wish(cpu=asked))

    assert level == choice.value == chosen
    assert bool(flags_of(level)) == (level in LEVELS)


def test_a_level_that_is_none_and_one_of_another_architecture_are_refused() -> None:
    with pytest.raises(UsageError, match="--cpu 'haswell' is none"):
        choose_processor(machine(), Wish(cpu="haswell"))
    with pytest.raises(UsageError, match="--cpu x86-64-v3 is of x86-64, and this machine is aarch64"):
        choose_processor(ARM, Wish(cpu="v3"))
    assert choose_processor(ARM, Wish())[0] == "native"


OP = """
class Op:
    error_log, build_for_cpu = None, False
    def is_compatible(self, verbose): return True
    def builder(self):
        from setuptools import Extension
        extension = Extension("op", ["op.cpp"])
        extension.extra_compile_args = {"cxx": ["-O1", "-g", "-march=native", "-D__AVX512__"]}
        return extension
    def extra_ldflags(self): return []
    def strip_empty_entries(self, args): return args
ALL_OPS = {"op": Op()}
"""
ACCELERATOR = """
from setuptools.command.build_ext import build_ext
class Build(build_ext):
    @classmethod
    def with_options(cls, use_ninja): return cls
    def build_extension(self, extension):
        extension.extra_compile_args = extension.extra_compile_args["cxx"]
        super().build_extension(extension)
class Accelerator:
    def device_name(self): return "cpu"
    def build_extension(self): return Build
def get_accelerator(): return Accelerator()
"""
SOURCE = """
#if defined(__AVX512__)
extern "C" int simd() { return 512; }
#elif defined(__AVX256__)
extern "C" int simd() { return 256; }
#endif
extern "C" void PyInit_op() {}
"""


@pytest.mark.parametrize(
    ("processor", "debug_info", "simd"), [("native", False, 512), ("x86-64-v3", False, 256), ("x86-64-v3", True, 256)]
)
def test_an_op_is_compiled_for_the_level_and_still_tells_it(
    processor: str, debug_info: bool, simd: int, tmp_path: Path
) -> None:
    (tmp_path / "op_builder").mkdir()
    (tmp_path / "op_builder" / "all_ops.py").write_text(OP)
    (tmp_path / "accelerator.py").write_text(ACCELERATOR)
    (tmp_path / "op.cpp").write_text(SOURCE)
    changes = json.dumps({"processor": flags_of(processor), "debug_info": debug_info})
    argv = [sys.executable, str(INSIDE / "compile_op.py"), "op", str(tmp_path / "place"), "serial", changes]

    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "dsdoctor: flags of op: -O1 -g -march=native -D__AVX512__ -> " in done.stdout
    (library,) = (tmp_path / "place" / "lib").glob("op*.so")
    flags = confess(library).cpu_flags
    assert any(flag.startswith("-march=") for flag in flags)
    assert ("-march=x86-64-v3" in flags) == (processor != "native")
    assert (b".debug_info" in library.read_bytes()) == debug_info
    told = subprocess.run(
        [sys.executable, "-c", "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).simd())", str(library)],
        capture_output=True,
        text=True,
    )
    assert told.stdout.strip() == str(simd)
