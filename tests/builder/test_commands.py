"""Commands asked of builders, in processes of a real interpreter; DeepSpeed's tree is a stand-in with the parts that are asked."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.builder.make.commands import OpCommands, ask_commands
from dsdoctor.builder.wheel.shared_object import load_each
from dsdoctor.core.children import PreloadedPython
from dsdoctor.core.host import LocalHost
from tests.builder.test_make import plan

pytest.importorskip("setuptools", reason="its build_ext gives the commands")
ACCELERATOR = """
from setuptools.command.build_ext import build_ext
class BuildExtension(build_ext):
    @classmethod
    def with_options(cls, **_):
        return cls
class Cpu:
    def device_name(self): return "cpu"
    def build_extension(self): return BuildExtension
def get_accelerator(): return Cpu()
"""
OPS = """
import os, sys
from setuptools import Extension
class Op:
    error_log = None
    def __init__(self, name): self.name = name
    def is_compatible(self, verbose): return True
    def extra_ldflags(self): return []
    def strip_empty_entries(self, words): return words
    def builder(self):
        forked = any("preloaded" in word for word in sys.orig_argv)
        with open("asked", "a") as log:
            log.write(f"{self.name} {'forked' if forked else 'new'}\\n")
        if self.name == "fails_in_a_fork" and forked:
            raise RuntimeError("cannot begin again in a forked process")
        if self.name == "dies_in_a_fork" and forked:
            os._exit(5)
        if self.name == "fails":
            raise RuntimeError("nowhere")
        return Extension(f"deepspeed.ops.{self.name}_op", ["csrc/a.cpp"])
ALL_OPS = {name: Op(name) for name in ("one", "two", "fails_in_a_fork", "dies_in_a_fork", "fails")}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree, with an interpreter beside it that has a torch."""
    tree = tmp_path / "tree"
    (tree / "op_builder").mkdir(parents=True)
    (tree / "accelerator.py").write_text(ACCELERATOR)
    (tree / "op_builder" / "__init__.py").write_text("")
    (tree / "op_builder" / "all_ops.py").write_text(OPS)
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec python3 "$@"\n')
    (tmp_path / "python").chmod(0o755)
    return tree


def asked(tree: Path, *ops: str) -> tuple[dict[str, OpCommands], list[str]]:
    """The commands, and which op was asked in which process."""
    python = str(tree.parent / "python")
    wanted = replace(plan(*ops), python=python)
    with PreloadedPython(python) as preloaded:
        preloaded.start()
        found = ask_commands(LocalHost(), wanted, tree=tree, env=dict(os.environ), preloaded=preloaded)
    return found, (tree / "asked").read_text().splitlines()


def test_all_ops_are_asked_in_the_process_that_has_torch(tree: Path) -> None:
    found, log = asked(tree, "one", "two")

    assert log == ["one forked", "two forked"]
    assert [len(found[op].all) for op in ("one", "two")] == [2, 2]
    assert "csrc/a.cpp" in found["one"].compile[0].argv


@pytest.mark.slow
def test_what_fails_in_a_fork_is_asked_in_a_new_process_before_it_counts(tree: Path) -> None:
    found, log = asked(tree, "one", "fails_in_a_fork", "fails", "dies_in_a_fork", "two")

    assert {op: found[op].error for op in found if found[op].error} == {"fails": "RuntimeError: nowhere"}
    assert log.count("one forked") == 1
    assert "one new" not in log
    assert {"fails_in_a_fork new", "dies_in_a_fork new", "two new"} <= set(log)


def test_an_op_that_does_not_load_beside_torch_is_tried_in_a_new_process(tree: Path) -> None:
    host = LocalHost(env=dict(os.environ))
    nothing = tree.parent / "nothing_op.so"
    python = str(tree.parent / "python")
    (tree.parent / "torch.py").write_text(
        f"import sys\nopen({str(tree / 'imports')!r}, 'a').write(sys.orig_argv[1] + '\\n')\n"
    )
    with PreloadedPython(python) as preloaded:
        preloaded.start()

        errors = load_each(host, python, {"nothing": nothing}, preloaded=preloaded)

    assert "nothing_op.so" in (errors["nothing"] or "")
    assert [Path(line).name for line in (tree / "imports").read_text().split()] == ["preloaded.py", "load_ops.py"]
