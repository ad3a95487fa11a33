"""Ops that are taken from the cache, and those that must not be: real builds by the machine's gcc."""

import os
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from dsdoctor.builder.cache.store import CacheStore
from dsdoctor.builder.make.make_wheel import Workdir
from dsdoctor.builder.make.manifest import EARLIEST, decode, write_into
from dsdoctor.core.build_models import BuildPlan, BuildResult, OpProgress, ToolkitPlan
from dsdoctor.core.machine import Cuda
from tests.builder.test_make import plan, run, workdir_in

Build = Callable[..., BuildResult]


@pytest.fixture
def store(tmp_path: Path) -> CacheStore:
    return CacheStore(tmp_path / "store", limit=1 << 30)


@pytest.fixture
def build(tmp_path: Path, store: CacheStore) -> Build:
    """Builds ops "one" and "two", each time in another folder; ``edit`` changes the tree before."""
    number = 0

    def built(made: BuildPlan | None = None, *, edit: Callable[[Path], object] = lambda tree: None) -> BuildResult:
        nonlocal number
        number += 1
        workdir: Workdir = replace(workdir_in(tmp_path / ("folder" * number)), store=store)
        edit(workdir.folder / "source")
        return run(made or plan("one", "two"), workdir)

    return built


def cached(result: BuildResult) -> dict[str, bool]:
    return {op.op: op.cached for op in result.ops if op.built}


def log(result: BuildResult, op: str) -> str:
    return next(Path(built.log or "").read_text() for built in result.ops if built.op == op)


def with_header(tree: Path) -> None:
    (tree / "csrc" / "one.h").write_text("#define ONE 1\n")
    (tree / "csrc" / "one.c").write_text('#include "one.h"\nint one(void) { return ONE; }\n')


@pytest.mark.slow
def test_what_was_compiled_is_not_compiled_again_in_another_folder(build: Build) -> None:
    first, second = build(), build()

    assert cached(first) == {"one": False, "two": False}
    assert cached(second) == {"one": True, "two": True}
    assert "taken from the cache" in log(second, "one")
    assert digest(first) == digest(second)


@pytest.mark.slow
def test_another_header_compiles_the_ops_that_read_it_and_no_other(build: Build) -> None:
    def change(tree: Path) -> None:
        with_header(tree)
        (tree / "csrc" / "one.h").write_text("#define ONE 2\n")

    build(edit=with_header)
    again = build(edit=change)

    assert cached(again) == {"one": False, "two": True}
    assert "built from a different csrc/one.h" in log(again, "one")
    assert cached(build(edit=with_header)) == {"one": True, "two": True}


@pytest.mark.slow
def test_a_new_header_that_could_hide_another_compiles_again(build: Build) -> None:
    build()

    assert cached(build(edit=lambda tree: (tree / "csrc" / "stdio.h").write_text(""))) == {"one": False, "two": False}


@pytest.mark.slow
def test_another_source_of_one_op_leaves_the_other_in_the_cache(build: Build) -> None:
    build()
    again = build(edit=lambda tree: (tree / "csrc" / "one.c").write_text("int one(void) { return 7; }"))

    assert cached(again) == {"one": False, "two": True}


@pytest.mark.slow
def test_other_flags_another_compiler_and_another_search_path_compile_again(build: Build, tmp_path: Path) -> None:
    wrapper = tmp_path / "gcc"
    wrapper.write_text('#!/bin/sh\nexec gcc "$@"\n')
    wrapper.chmod(0o755)
    build()

    assert cached(build(replace(plan("one"), debug_info=True))) == {"one": False}
    assert cached(build(plan("one", CC=str(wrapper)))) == {"one": False}
    assert cached(build(plan("one", CPATH="/usr/include"))) == {"one": False}
    assert cached(build(plan("one"))) == {"one": True}


@pytest.mark.slow
def test_a_flipped_byte_is_dropped_said_and_compiled_again(build: Build, store: CacheStore) -> None:
    build()
    (entry,) = [entry for entry in store.entries() if entry.facts["op"] == "one"]
    (file,) = [path for path in entry.folder.iterdir() if path.suffix == ".so"]
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    again = build()

    assert cached(again) == {"one": False, "two": True}
    assert any("one" in sentence for sentence in store.dropped)
    assert cached(build()) == {"one": True, "two": True}


@pytest.mark.slow
def test_a_file_written_while_it_is_compiled_keeps_the_op_out_of_the_cache(build: Build, store: CacheStore) -> None:
    def tomorrow(tree: Path) -> None:
        os.utime(tree / "csrc" / "one.c", (time.time() + 86400,) * 2)

    build(edit=tomorrow)

    assert [entry.facts["op"] for entry in store.entries()] == ["two"]
    assert any("was written while it was compiled" in sentence for sentence in store.complaints)


@pytest.mark.slow
def test_ccache_serves_the_objects_of_a_miss_and_no_link(build: Build, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ccache").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/served\nexec "$@"\n')
    (tools / "ccache").chmod(0o755)
    wanted = replace(plan("one"), prepend={"PATH": (str(tools),)})

    assert cached(build(wanted)) == {"one": False}
    (served,) = (tmp_path / "served").read_text().splitlines()
    assert "-c csrc/one.c" in served
    assert cached(build(wanted)) == {"one": True}


@pytest.mark.slow
def test_a_header_or_library_that_would_be_found_earlier_compiles_again(build: Build, tmp_path: Path) -> None:
    early, libraries = tmp_path / "early", tmp_path / "libraries"
    early.mkdir()
    libraries.mkdir()
    wanted = plan("one", CPATH=str(early), LIBRARY_PATH=str(libraries))
    assert [cached(build(wanted))["one"] for _ in range(2)] == [False, True]

    (early / "late.h").touch()
    (libraries / "unrelated").touch()

    assert [cached(build(wanted))["one"] for _ in range(2)] == [False, True]


@pytest.mark.slow
def test_a_header_outside_that_is_changed_while_others_compile_keeps_its_op_out(build: Build, tmp_path: Path) -> None:
    header = tmp_path / "outside" / "x.h"
    header.parent.mkdir()
    header.write_text("#define X 1\n")

    def reads_it(tree: Path) -> None:
        (tree / "csrc" / "one.c").write_text("#include <x.h>\nint one(void) { return X; }\n")

    changing = tmp_path / "gcc"
    changing.write_text(f'#!/bin/sh\necho "#define X 2" > {header}\nexec /usr/bin/gcc "$@"\n')
    changing.chmod(0o755)

    assert cached(build(plan("one", CPATH=str(header.parent), CC=str(changing)), edit=reads_it)) == {"one": False}
    again = build(plan("one", CPATH=str(header.parent), CC=str(changing)), edit=reads_it)
    assert cached(again) == {"one": False}


@pytest.mark.slow
def test_an_odd_folder_of_headers_is_no_end_of_a_build(build: Build, tmp_path: Path) -> None:
    folder = tmp_path / "o'brien's headers"
    folder.mkdir()
    (folder / "x.h").write_text("#define X 1\n")
    wanted = plan("one", CPATH=str(folder))

    def reads_it(tree: Path) -> None:
        (tree / "csrc" / "one.c").write_text("#include <x.h>\nint one(void) { return X; }\n")

    assert [cached(build(wanted, edit=reads_it))["one"] for _ in range(2)] == [False, True]


@pytest.mark.slow
def test_an_op_that_fails_its_proof_is_not_served_again(build: Build, store: CacheStore) -> None:
    assert build(plan("one", LIES="unloadable")).wheel is None
    assert list(store.entries()) == []


@pytest.mark.slow
def test_a_failed_op_is_not_kept(build: Build, store: CacheStore) -> None:
    build(plan("bad", "one"))

    assert [entry.facts["op"] for entry in store.entries()] == ["one"]


@pytest.mark.slow
def test_what_an_op_was_made_from_is_told_for_the_whole_wheel(build: Build) -> None:
    first, second = build(), build()

    assert first.inputs == second.inputs
    assert first.inputs is not None
    assert any(path.endswith("/cc1plus") for path in first.inputs)
    assert build(plan("bad", "one")).inputs is None


@pytest.mark.slow
def test_the_same_inputs_give_the_same_wheel_in_any_folder(tmp_path: Path) -> None:
    wheels = [digest(run(plan("one", "two"), workdir_in(tmp_path / place))) for place in ("a", "another/and/longer")]

    assert wheels[0] == wheels[1]


@pytest.mark.slow
def test_the_hour_and_the_mode_of_the_packed_files_do_not_reach_the_wheel(build: Build, tmp_path: Path) -> None:
    result = build()
    manifest = decode(Path(result.manifest or "").read_bytes())
    written = []
    for year, mode in ((2001, 0o600), (2026, 0o664)):
        packed = tmp_path / str(year) / "deepspeed-1.0-py3-none-any.whl"
        packed.parent.mkdir()
        with zipfile.ZipFile(packed, "w") as new:
            for name in sorted(("b.py", "a.py", "x.dist-info/RECORD"), reverse=year == 2001):
                entry = zipfile.ZipInfo(name, date_time=(year, 1, 1, 0, 0, 0))
                entry.external_attr = mode << 16
                new.writestr(entry, "")
        out = tmp_path / f"out-{year}"
        out.mkdir()
        written.append(write_into(packed, manifest, out, {}, epoch=EARLIEST).read_bytes())

    assert written[0] == written[1]


def digest(result: BuildResult) -> str:
    return sha256(Path(result.wheel or "").read_bytes()).hexdigest()


@pytest.mark.slow
def test_an_op_that_was_compiled_beside_one_that_needs_a_toolkit_is_taken_when_it_is_asked_alone(
    build: Build, tmp_path: Path
) -> None:
    """cpu_adam beside fused_adam: the toolkit's folder was renamed in its objects too, although none of them names it."""
    toolkit = ToolkitPlan(root=str(tmp_path / "cuda"), release=Cuda(13, 0), headers=())
    beside = replace(
        plan("one", "two"),
        toolkit=toolkit,
        prepend={"PATH": ("/first",), "LIBRARY_PATH": (f"{toolkit.root}/lib64/stubs",)},
    )

    build(beside)

    assert cached(build(plan("one"))) == {"one": True}


@pytest.mark.slow
def test_an_op_that_is_compiled_again_is_expected_to_take_as_long_as_before(tmp_path: Path, store: CacheStore) -> None:
    steps: list[OpProgress] = []
    first = replace(workdir_in(tmp_path / "first"), store=store)
    run(plan("one"), first)
    again = replace(workdir_in(tmp_path / "again"), store=store)
    with_header(again.folder / "source")

    run(plan("one", "two"), again, steps)

    expected = {step.op: step.expected for step in steps if step.state == "compiling"}
    assert expected["one"] is not None
    assert 0.0 < expected["one"] < 5.0
    assert expected["two"] is None
