"""The proof of a wheel whose op ends the process that imports it with SIGILL."""

import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.builder.make.manifest import prove
from dsdoctor.core.machine import System
from tests.builder.test_make import plan
from tests.conftest import CPU_TORCH, machine

AVX2 = frozenset(
    ["pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"]
)
HERE = machine(torch=CPU_TORCH, system=System(architecture="x86_64", os="Debian", cpu_flags=AVX2))


@pytest.mark.parametrize(("processor", "proven"), [("x86-64-v4", None), ("x86-64-v3", False)])
def test_an_import_that_ends_with_sigill_says_nothing_where_the_processor_lacks_the_level(
    processor: str, proven: bool | None, tmp_path: Path
) -> None:
    (tmp_path / "one.c").write_text("int one(void) { return 1; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "one.so", "one.c"], cwd=tmp_path, check=True)
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        wheel.write(tmp_path / "one.so", "deepspeed/ops/one_op.cpython-311-x86_64-linux-gnu.so")
        wheel.writestr("deepspeed/git_version_info_installed.py", "installed_ops={'one': 1}\n")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -ILL $$\n")
    python.chmod(0o755)
    wanted = replace(plan("one"), python=str(python), processor=processor)

    (proof,), notes = prove(tmp_path / "x.whl", wanted, HERE, folder=tmp_path / "proof", env={"PATH": "/usr/bin:/bin"})

    assert proof.loads is proven
    assert (proof.wrong is None) == (proven is None)
    assert [note.rule for note in notes] == (["not-proven"] if proven is None else [])
    assert proven is False or all(fact in notes[0].title for fact in ("one", "SIGILL", "-mavx512f, -mavx512bw"))
