"""checkpoint --universal and --merge are killed, or find the disk full, at each of their writes: nothing half-made has a name.

A library of C stands between dsdoctor and the system and counts what changes the disk; at a number it kills, or says ENOSPC.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.checkpoint.facts import examine
from dsdoctor.checkpoint.folder import look, read_tag
from dsdoctor.checkpoint.judge import judge
from dsdoctor.checkpoint.loading import Plan
from tests.checkpoint.test_universal import adam, convert, converter, universal
from tests.checkpoint.written import Kind

FAULTS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
static long left = -1;
static int full;
__attribute__((constructor)) static void begin(void) {
    char *at = getenv("FAULT_AT");
    left = at ? atol(at) : -1;
    full = getenv("FAULT_FULL") != NULL;
    unsetenv("FAULT_AT");
    unsetenv("LD_PRELOAD");
}
static int hit(void) {
    if (left < 0 || --left >= 0) return 0;
    left = 0;  /* a full disk stays full */
    if (!full) kill(getpid(), SIGKILL);
    errno = ENOSPC;
    return 1;
}
static int regular(int fd) {
    struct stat state;
    return fstat(fd, &state) == 0 && S_ISREG(state.st_mode);
}
#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
ssize_t write(int fd, const void *from, size_t size) { REAL(write); return regular(fd) && hit() ? -1 : real(fd, from, size); }
int fsync(int fd) { REAL(fsync); return regular(fd) && hit() ? -1 : real(fd); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return hit() ? -1 : real(path, mode); }
int rename(const char *from, const char *to) { REAL(rename); return hit() ? -1 : real(from, to); }
int renameat(int a, const char *from, int b, const char *to) { REAL(renameat); return hit() ? -1 : real(a, from, b, to); }
"""
ORIGINAL = frozenset({"global_step2", "latest"})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "faults.c").write_text(FAULTS)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "faults.so", "faults.c", "-ldl"], cwd=folder, check=True)
    return folder / "faults.so"


def run_until(number: int, library: Path, full: bool, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """dsdoctor checkpoint with a fault at one of its changes to the disk."""
    env = {**os.environ, "LD_PRELOAD": str(library), "FAULT_AT": str(number), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "dsdoctor", "checkpoint", *arguments]
    return subprocess.run(command, env={**env, **({"FAULT_FULL": "1"} if full else {})}, capture_output=True, text=True)


SOME_OR_EACH = pytest.mark.parametrize(
    "at",
    [
        pytest.param("some", marks=pytest.mark.slow),
        pytest.param("each", marks=pytest.mark.exhaustive),
    ],
)
SOME = (0, 5, 20, 52, 59, 60, 10_000)


@SOME_OR_EACH
@pytest.mark.parametrize("full", [False, True], ids=["killed", "full"])
def test_a_conversion_that_ends_anywhere_leaves_no_half_made_tag(
    full: bool, at: str, library: Path, tmp_path: Path
) -> None:
    kind = Kind(stage=1)
    saved = tmp_path / "saved"
    before = {path: path.read_bytes() for path in adam(saved, kind).iterdir()}
    prepared = universal(tmp_path / "prepared", kind)
    program = converter(tmp_path / "python", prepared)
    for number in itertools.count() if at == "each" else SOME:
        out = saved / f"new{number}"
        done = run_until(number, library, full, str(saved), "--universal", str(out), "--python", program)

        assert "Traceback" not in done.stderr, (number, done.stderr)
        assert number or done.returncode == (3 if full else -9), done.stderr
        assert {path: path.read_bytes() for path in before} == before, number
        tags = {tag.name for tag in look(saved).tags} - {f"new{each}" for each in range(number)}
        assert tags in ({"global_step2"}, {"global_step2", out.name}), (number, tags)
        if out.exists():
            folder = look(saved)
            tag = folder.tag(out.name)
            assert tag is not None
            assert not any(file.problem for file in examine(folder, read_tag(tag)).tag.files), number
        if full:
            # what is full keeps no hidden folder, and says so
            assert not list(saved.glob(".dsdoctor-*")), number
            assert done.returncode == 0 or "full" in done.stderr, (number, done.returncode, done.stderr)
        if done.returncode == 0:
            print(f"{number} changes of the disk")
            break
    assert done.returncode == 0, done.stderr
    assert convert(saved, saved / "last", program) is not None
    # a kill within the write of latest_universal leaves that hidden file, and no more
    assert [path for path in saved.glob(".dsdoctor-*") if path.is_dir() or path.stat().st_size > 100] == []
    assert judge(look(saved), "last", Plan()).outcome is not None


@SOME_OR_EACH
@pytest.mark.parametrize("full", [False, True], ids=["killed", "full"])
def test_a_merge_that_ends_anywhere_goes_on_and_is_the_same(full: bool, at: str, library: Path, tmp_path: Path) -> None:
    adam(tmp_path / "saved", Kind(stage=2))
    whole, out = tmp_path / "whole", tmp_path / "out"
    arguments = ("--largest-file", "0.00000003", "--merge")
    assert run_until(10_000, library, full, str(tmp_path / "saved"), *arguments, str(whole)).returncode == 0
    wanted = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert len(wanted) > 2
    for number in itertools.count() if at == "each" else SOME:
        done = run_until(number, library, full, str(tmp_path / "saved"), *arguments, str(out))

        assert "Traceback" not in done.stderr, (number, done.stderr)
        assert number or done.returncode == (3 if full else -9), done.stderr
        made = {path.name: path.read_bytes() for path in out.glob("[!.]*")} if out.exists() else {}
        assert made.items() <= wanted.items(), number
        if done.returncode == 0:
            print(f"{number} changes of the disk")
            break
        for path in out.glob("[!.]*"):
            path.unlink()
    assert made == wanted
