"""Shared objects made here by the machine's gcc, and a wheel of the wrong kind."""

import struct
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsdoctor.builder.make.commands import first_error
from dsdoctor.builder.make.manifest import planned_gpu_code
from dsdoctor.builder.wheel.shared_object import (
    CONTAINER,
    ENTRY,
    MAGIC,
    ElfInfo,
    architectures,
    parse_producers,
    read_elf,
)
from dsdoctor.core.build_models import OpPlan


@pytest.fixture
def library(tmp_path: Path) -> Path:
    source = tmp_path / "x.c"
    source.write_text('#include <string.h>\n#include <stdio.h>\nint f(char *p){return printf("%zu", strlen(p));}')
    path = tmp_path / "x.so"
    subprocess.run(["gcc", "-g", "-shared", "-fPIC", "-march=x86-64", "-mavx2", "-o", path, source], check=True)
    return path


def test_a_shared_object_is_read(library: Path) -> None:
    elf_info = read_elf(library)

    assert elf_info.sm_arch == ()
    assert elf_info.glibc is not None
    assert elf_info.glibc.startswith("2.")
    assert set(elf_info.cpu_flags) >= {"-march=x86-64", "-mavx2"}


def test_what_a_shared_object_links_and_where_it_looks_is_read(library: Path) -> None:
    target = library.with_name("y.so")
    options = ["-shared", "-Wl,--no-as-needed", "-lm", "-Wl,-rpath,/a:$ORIGIN/b"]
    subprocess.run(["gcc", *options, "-o", target, library.with_name("x.c")], check=True)

    elf_info = read_elf(target)

    assert (elf_info.needed, elf_info.run_path) == (("libm.so.6", "libc.so.6"), ("/a", "$ORIGIN/b"))
    assert read_elf(library).run_path == ()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.integers(0, 2000), noise=st.binary(min_size=1, max_size=16), fraction=st.floats(0, 1))
@pytest.mark.slow
def test_a_damaged_shared_object_is_read_to_an_end(library: Path, place: int, noise: bytes, fraction: float) -> None:
    data = bytearray(library.read_bytes())
    start = place if fraction < 0.5 else int((len(data) - 16) * fraction)
    data[start : start + len(noise)] = noise
    damaged = library.with_name("damaged.so")
    damaged.write_bytes(data)

    assert isinstance(read_elf(damaged), ElfInfo)


def endless_names(length: int, sections: int) -> bytes:
    """A shared object whose every section, and every version that it needs, has the one name of so many letters."""
    names = b"\0" + b"n" * length + b"\0"
    versions = struct.pack("<HHIII", 1, 900, 1, 16, 0) + struct.pack("<IHHII", 0, 0, 0, 1, 16) * 900
    places = [64, 64 + len(names), 64 + len(names) + len(versions)]
    header = struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, places[2], 0, 64, 56, 0, 64, sections, 1)
    table = [
        bytes(64),
        struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, places[0], len(names), 0, 0, 1, 0),
        struct.pack("<IIQQQQIIQQ", 1, 0x6FFFFFFE, 0, 0, places[1], len(versions), 1, 1, 1, 0),
        *[struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, 0, 0, 0, 0, 1, 0)] * (sections - 3),
    ]
    return b"\x7fELF\2\1\1" + bytes(9) + header + names + versions + b"".join(table)


@pytest.mark.parametrize(("length", "sm_arch"), [(100, ()), (8_000_000, None)])
def test_a_name_without_an_end_ends_the_reading(length: int, sm_arch: tuple[str, ...] | None, tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(endless_names(length, 500))
    began = time.process_time()

    assert read_elf(path).sm_arch == sm_arch
    assert time.process_time() - began < 5


def fatbin(*entries: tuple[int, int]) -> bytes:
    """A container as nvcc's fatbinary writes it: entries of (kind, architecture)."""
    body = b"".join(
        ENTRY.pack(kind, 1, 64, 8, 0, 0, 0, 0, number).ljust(64, b"\0") + b"contents" for kind, number in entries
    )
    return CONTAINER.pack(MAGIC, 1, CONTAINER.size, len(body)) + body


def test_machine_code_and_ptx_of_every_container_are_read() -> None:
    section = fatbin((2, 80), (1, 90)) + b"\0" * 8 + fatbin((2, 90), (7, 99))

    op = OpPlan(op="a", variable="A", module="a", sources=(), architectures=("8.0", "9.0+PTX"), device_code=True)
    assert set(architectures(section)) == planned_gpu_code(op) == {"80_real", "90_real", "90_virtual"}


@given(st.binary(max_size=300), st.integers(0, 200))
def test_any_bytes_are_read_to_an_end(noise: bytes, cut: int) -> None:
    assert isinstance(architectures(noise), tuple)
    assert isinstance(architectures(fatbin((2, 80), (2, 90))[:cut] + noise), tuple)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF" + b"\xff" * 200, b"no elf"])
def test_what_is_no_shared_object_gives_no_facts(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(content)

    elf_info = read_elf(path)

    assert (elf_info.glibc, elf_info.cpu_flags) == (None, ())


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
