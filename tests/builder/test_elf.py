"""Shared objects made here by the machine's gcc, and a wheel of the wrong kind."""

import subprocess
from pathlib import Path

import pytest

from dsdoctor.builder.elf import confess, parse_producers
from dsdoctor.builder.first_error import first_error
from dsdoctor.builder.nouns import OpPlan
from dsdoctor.builder.prove import planned
from dsdoctor.host import LocalHost


@pytest.fixture
def library(tmp_path: Path) -> Path:
    source = tmp_path / "x.c"
    source.write_text('#include <string.h>\n#include <stdio.h>\nint f(char *p){return printf("%zu", strlen(p));}')
    path = tmp_path / "x.so"
    subprocess.run(["gcc", "-g", "-shared", "-fPIC", "-march=x86-64", "-mavx2", "-o", path, source], check=True)
    return path


def test_a_shared_object_confesses(library: Path) -> None:
    confession = confess(LocalHost(), library, cuobjdump=None)

    assert confession.sm_arch is None
    assert confession.glibc is not None
    assert confession.glibc.startswith("2.")
    assert set(confession.cpu_flags) >= {"-march=x86-64", "-mavx2"}


def test_cuobjdump_is_asked_for_machine_code_and_ptx(library: Path, tmp_path: Path) -> None:
    tool = tmp_path / "cuobjdump"
    tool.write_text(
        "#!/bin/sh\ncase $1 in --list-elf) echo 'ELF file    1: a.1.sm_80.cubin'; echo 'ELF file    2: a.2.sm_90.cubin';;\n"
        "*) echo 'PTX file    1: a.1.sm_90.ptx';; esac\n"
    )
    tool.chmod(0o755)

    confession = confess(LocalHost(), library, cuobjdump=str(tool))

    op = OpPlan(op="a", variable="A", module="a", sources=(), architectures=("8.0", "9.0+PTX"), device_code=True)
    assert set(confession.sm_arch or ()) == planned(op) == {"80_real", "90_real", "90_virtual"}


@pytest.mark.parametrize(
    ("answer", "sm_arch"),
    [("echo 'info: File does not contain device code' >&2; exit 255", ()), ("echo fatal >&2; exit 1", None)],
)
def test_no_gpu_code_and_no_answer_are_two_things(
    answer: str, sm_arch: tuple[str, ...] | None, library: Path, tmp_path: Path
) -> None:
    tool = tmp_path / "cuobjdump"
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(0o755)

    assert confess(LocalHost(), library, cuobjdump=str(tool)).sm_arch == sm_arch


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF" + b"\xff" * 200, b"no elf"])
def test_what_is_no_shared_object_confesses_nothing(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(content)

    confession = confess(LocalHost(), path, cuobjdump=None)

    assert (confession.glibc, confession.cpu_flags) == (None, ())


def test_flags_that_are_not_about_the_machine_are_left_out() -> None:
    producer = b"GNU C++20 12.2.0 -march=rocketlake -mno-sse4a -mtune=generic -mavx -O3 -fPIC"

    assert parse_producers(producer) == ("-march=rocketlake", "-mavx")


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            ["/usr/bin/ld: cannot find -lcurand: No such file or directory", "collect2: error: ld returned 1"],
            "-lcurand",
        ),
        (["nvcc fatal   : Unsupported gpu architecture 'compute_60'"], "compute_60"),
        (["g++ -O3 -DERROR=error: -c x.cpp", "x.cpp:3: error: expected ';'"], "expected ';'"),
        (["a.o: error writing to a.o: No space left on device"], "No space left"),
        (["nvcc error   : 'cicc' died due to signal 9 (Kill signal)"], "signal 9"),
        (["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'dskernels'"], "dskernels"),
        (["RuntimeError: Error compiling objects for extension", "sh: c++: not found"], "c++: not found"),
        (["ninja: build stopped: subcommand failed."], None),
        ([], None),
    ],
)
def test_the_first_real_error(lines: list[str], cause: str | None) -> None:
    found = first_error(lines)

    assert (found is None) == (cause is None)
    assert cause is None or cause in (found or "")
