"""What is changed in the commands of DeepSpeed's builders."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from dsdoctor.builder.make.commands import (
    LATE_COLLECTION,
    Command,
    FlagSettings,
    changes,
    dependency_file,
    edited,
    flag_settings,
    memory_of,
    read_command,
    threaded,
)
from tests.builder.test_make import plan
from tests.conftest import CPU_TORCH, machine
from tests.conftest import GCC as COMPILER

TREE = Path("/tree")
GCC = ["g++", "-g", "-O3", "-I/tree/csrc", "-c", "csrc/a.cpp", "-o", "build/a.o", "-g", "-march=native", "-D__AVX512__"]
NVCC = [
    "/cuda/bin/nvcc",
    "-I/tree/csrc",
    "-c",
    "csrc/a.cu",
    "-o",
    "build/a.o",
    "-O3",
    "--threads=8",
    "-gencode=arch=compute_90,code=sm_90",
]
LINK = ["g++", "-shared", "build/a.o", "-L/torch/lib", "-lc10", "-o", "build/a.so"]


def command(argv: list[str]) -> Command:
    return read_command(argv, TREE)


def test_debug_information_goes_and_what_gcc_was_told_stays_readable() -> None:
    after = edited(command(GCC), FlagSettings()).argv

    assert "-g" not in after
    assert {"-g0", "-frecord-gcc-switches", "-march=native", "-D__AVX512__"} <= set(after)


@pytest.mark.parametrize(
    ("kind", "major", "secret", "recorded"),
    [("gcc", 12, True, True), ("gcc", 10, True, False), ("gcc", 10, False, True), ("clang", 18, True, False)],
)
def test_a_compiler_that_records_definitions_does_not_where_they_may_be_secret(
    kind: str, major: int, secret: bool, recorded: bool
) -> None:
    here = machine(torch=CPU_TORCH, compilers=(replace(COMPILER, kind=kind, version=(major, 1)),))
    settings = flag_settings(plan("one"), here, TREE, secret_flags=secret)

    assert ("-frecord-gcc-switches" in edited(command(GCC), settings).argv) is recorded


@pytest.mark.parametrize(("kind", "given"), [("gcc", True), ("clang", False)])
def test_gcc_gets_memory_for_time_and_no_other_compiler_is_given_its_parameters(kind: str, given: bool) -> None:
    here = machine(torch=CPU_TORCH, compilers=(replace(COMPILER, kind=kind),))
    settings = flag_settings(plan("one"), here, TREE)
    by_nvcc = edited(command(NVCC), settings).argv
    passed_on = [after for before, after in pairwise(by_nvcc) if before == "-Xcompiler"]

    for argv in (edited(command(GCC), settings).argv, passed_on):
        assert [word for word in argv if word.startswith("--param")] == list(LATE_COLLECTION if given else ())


def test_debug_information_stays_where_it_is_asked_for() -> None:
    after = edited(command(GCC), FlagSettings(debug_info=True)).argv

    assert after.count("-g") == 2
    assert "-g0" not in after


def test_a_level_takes_the_place_of_native_and_of_its_macro() -> None:
    after = edited(command(GCC), FlagSettings(host=("-march=x86-64-v3", "-D__AVX256__"))).argv

    assert {"-march=x86-64-v3", "-D__AVX256__"} <= set(after)
    assert not {"-march=native", "-D__AVX512__"} & set(after)


def test_nvcc_has_as_many_threads_as_it_was_ordered_to_have() -> None:
    single, three = (threaded(edited(command(NVCC), FlagSettings()), threads).argv for threads in (1, 3))

    assert not [word for word in single if word.startswith("--threads")]
    assert "--threads=3" in three


def test_what_nvcc_would_say_of_this_machine_goes() -> None:
    argv = [*NVCC, "-lineinfo"]
    after = edited(command(argv), FlagSettings(renamed=(("/env/torch", "torch"),), own_temporaries=True)).argv

    assert "-lineinfo" not in after
    assert "-objtemp" in after
    assert after[after.index("-ffile-prefix-map=/env/torch=torch") - 1] == "-Xcompiler"
    assert "-lineinfo" in edited(command(argv), FlagSettings(debug_info=True)).argv


def test_every_compiler_lists_what_it_read_and_the_linker_says_it() -> None:
    for argv in (GCC, NVCC):
        after = edited(command(argv), FlagSettings())
        assert after.argv[after.argv.index("-MF") + 1] == dependency_file(after) == "build/a.o.d"
    assert edited(command(LINK), FlagSettings()).argv[-1] == "-Wl,--trace"


def test_nothing_of_the_tree_is_named_by_where_it_lies() -> None:
    for argv in (GCC, NVCC, LINK):
        assert not [word for word in edited(command(argv), FlagSettings()).argv if "/tree" in word]


def test_the_log_says_what_was_changed() -> None:
    before = command(GCC)

    changed = changes(before, edited(before, FlagSettings()))

    assert changed.startswith("-g -g -> -g0 -frecord-gcc-switches")
    assert changes(before, before) == ""


def test_a_thread_of_nvcc_weighs_as_much_as_an_nvcc() -> None:
    light, heavy = (memory_of(threaded(edited(command(NVCC), FlagSettings()), threads)) for threads in (1, 3))

    assert heavy == 3 * light
    assert memory_of(command(LINK)) < memory_of(command(GCC)) < light


def test_a_folder_that_is_not_known_renames_nothing() -> None:
    settings = flag_settings(plan("one"), machine(torch=replace(CPU_TORCH, location="")), TREE)

    assert all(folder for folder, _ in settings.renamed)
