"""Whether installed ops load: real processes, by an interpreter that answers as a torch environment would, or dies of an op."""

from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.builder.wheel.shared_object import load_installed
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import DeepSpeed, Driver
from tests.cli.runner import run
from tests.conftest import machine

ANSWERS = """#!/bin/sh
case "$2" in
    *fused_adam_op*,*|*,*fused_adam_op*) kill -9 $$ ;;
    *async_io_op*) echo 'DSDOCTOR {"async_io": "libaio.so.1: cannot open shared object file"}' ;;
    *dc_op*) echo 'DSDOCTOR {"dc": "libcuda.so.1: cannot open shared object file"}' ;;
    *utils_op*) echo 'DSDOCTOR {"utils": null}' ;;
    *) kill -9 $$ ;;
esac
"""


def built(folder: Path, *ops: str) -> DeepSpeed:
    """An installed DeepSpeed with files of those ops, which nobody opens."""
    for op in ops:
        (folder / f"{op}_op.so").write_bytes(b"")
    return DeepSpeed(version="0.19.8", location=str(folder), installed_ops=(*ops, "claimed_only"))


def test_each_op_that_does_not_load_is_told_also_when_one_takes_the_process_with_it(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(ANSWERS)
    python.chmod(0o755)
    here = built(tmp_path, "async_io", "dc", "fused_adam", "utils")

    found = load_installed(LocalHost(), str(python), here, machine())

    assert {(finding.rule, *finding.affects) for finding in found} == {
        ("op-does-not-load", "async_io"),
        ("op-does-not-load", "fused_adam"),
        ("not-proven", "dc"),
    }
    assert "async_io does not load with this torch: libaio.so.1: cannot open" in found[0].title
    with_driver = replace(machine(), driver=Driver(version="580.1", cuda=None))
    told = load_installed(LocalHost(), str(python), built(tmp_path, "dc"), with_driver)
    assert [finding.rule for finding in told] == ["op-does-not-load"], (
        "with a driver a missing libcuda is the op's matter"
    )


@pytest.mark.parametrize("more", [("x.whl",), ("--installed", "--machine", "m.json")])
def test_what_is_only_looked_at_is_not_loaded(more: tuple[str, ...]) -> None:
    done = run("wheel", "verify", "--load", *more)

    assert done.returncode == 2
    assert "--load needs the DeepSpeed that is installed here" in done.stderr
