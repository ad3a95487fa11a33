"""`dsdoctor install --hostfile` between two machines with sshd: real environments, the real dsdoctor and pip in them."""

import base64
import hashlib
import json
import os
import signal
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dsdoctor
from tests.comm import faults
from tests.comm.conftest import need
from tests.comm.rig import Node, Rig, missing, wait_until
from tests.comm.services import lacks, sshd

pytestmark = pytest.mark.launch

VERSION = "0.19.8+install"
NAME = f"deepspeed-{VERSION}-py3-none-any.whl"
INFO = f"deepspeed-{VERSION}.dist-info"
PYTHON = "/run/python"
"""On every node, and another one on each: /run is a file system of its own there."""
SCRIPT = '#!/bin/sh\nTMPDIR=/run/tmp exec /run/env/bin/python "$@"\n'


def plain_wheel(folder: Path) -> Path:
    """A DeepSpeed without ops, for any Python, that tells when it is imported."""
    files = {
        "deepspeed/__init__.py": b"print('imported')\n",
        "deepspeed/git_version_info_installed.py": (
            f"version='{VERSION}'\ninstalled_ops={{'cpu_adam': False}}\naccelerator_name='cpu'\n".encode()
        ),
        "deepspeed/data.bin": os.urandom(8 << 20),
        f"{INFO}/METADATA": f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\n".encode(),
        f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for name, data in files.items()}
    lines = [f"{name},sha256={digest.rstrip(b'=').decode()},{len(files[name])}" for name, digest in digests.items()]
    path = folder / NAME
    with zipfile.ZipFile(path, "w") as file:
        for name, data in files.items():
            file.writestr(name, data)
        file.writestr(f"{INFO}/RECORD", "\n".join([*lines, f"{INFO}/RECORD,,"]))
    return path


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Rig]:
    """Two nodes with sshd, each with an environment of its own that lends this one's packages, but for DeepSpeed."""
    need(missing() or lacks("ssh", "sshd"))
    venv.create(tmp_path / "env", symlinks=True)
    lent = tmp_path / "lent"
    lent.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.lower().startswith(("deepspeed", "dsdoctor", "__editable__", "_")) and path.suffix != ".pth":
            (lent / path.name).symlink_to(path)
    (lent / "dsdoctor").symlink_to(Path(dsdoctor.__file__).parent)
    (site(tmp_path / "env") / "lent.pth").write_text(f"{lent}\n")
    plain_wheel(tmp_path)
    with Rig(tmp_path / "rig") as rig, sshd(rig):
        for node in rig.nodes:
            node.run(["cp", "-a", str(tmp_path / "env"), "/run/env"], check=True)
            node.run(["sh", "-c", f"echo '{SCRIPT}' >{PYTHON} && chmod 755 {PYTHON}"], check=True)
        yield rig


def site(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def argv(rig: Rig, hosts: str, *more: str) -> list[str]:
    hostfile = rig.folder / "install-hosts"
    hostfile.write_text("".join(f"{host} slots=8\n" for host in hosts.split()))
    made = rig.folder.parent / NAME
    where = ["--hostfile", str(hostfile), "--python", PYTHON]
    return [sys.executable, "-m", "dsdoctor", "install", str(made), *where, *more]


def install(rig: Rig, hosts: str, *more: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """The exit status, the nodes by name, and the titles of all findings but the note that this wheel holds no op."""
    done = rig[0].run(argv(rig, hosts, "--json", *more), timeout=120)
    document = json.loads(done.stdout)
    nodes = {node["host"]: node for node in document["nodes"]}
    titles = [finding["title"] for finding in document["findings"] if finding["rule"] != "wheel-without-ops"]
    return done.returncode, nodes, "\n".join(titles)


def found(node: Node) -> str:
    """The version of DeepSpeed that the node's interpreter finds."""
    ask = "import importlib.metadata as m; print(*[d.version for d in m.distributions(name='deepspeed')])"
    return node.run([PYTHON, "-c", ask], check=True).stdout.strip()


def left(node: Node) -> str:
    return node.run(["ls", "-AR", "/run/tmp"]).stdout.removeprefix("/run/tmp:\n")


def test_both_nodes_get_the_wheel_and_a_second_time_finds_it_there(pair: Rig) -> None:
    status, nodes, titles = install(pair, "nodea nodeb")
    again = pair[0].run(argv(pair, "nodea nodeb"), timeout=120)

    assert (status, titles) == (0, ""), (nodes, titles)
    assert [node["state"] for node in nodes.values()] == ["installed", "installed"]
    assert [found(node) for node in pair.nodes] == [VERSION, VERSION]
    assert pair[1].run([PYTHON, "-c", "import deepspeed"], check=True).stdout == "imported\n"
    assert [left(node) for node in pair.nodes] == ["", ""]
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("it already exists") == 2


def test_a_node_that_refuses_and_one_that_is_down_stop_no_other(pair: Rig) -> None:
    without = pair.folder / "without"
    without.mkdir()
    for path in (pair.folder.parent / "lent").iterdir():
        if not path.name.startswith("torch"):
            (without / path.name).symlink_to(path)
    (where,) = pair[1].run(["sh", "-c", "ls /run/env/lib/python*/site-packages/lent.pth"]).stdout.split()
    pair[1].run(["sh", "-c", f"echo {without} >{where}"], check=True)
    held = install(pair, "nodea nodeb", "--all-or-nothing")
    before = found(pair[0])
    refused = install(pair, "nodea nodeb")
    with faults.cable_pulled(pair, 1):
        down = install(pair, "nodea nodeb nodez")

    assert (held[0], held[1]["nodea"]["state"], before) == (1, "verified", "")
    assert (refused[0], [node["state"] for node in refused[1].values()]) == (1, ["installed", "refused"])
    assert "nodeb: torch is not installed in the environment of" in refused[2]
    assert [found(node) for node in pair.nodes] == [VERSION, ""]
    assert (down[0], [node["state"] for node in down[1].values()]) == (4, ["installed", "unreachable", "unreachable"])
    assert "nodeb: ssh failed: nothing answers at its address" in down[2]
    assert "nodez: ssh failed: its name does not resolve here" in down[2]
    assert [left(node) for node in pair.nodes] == ["", ""]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_installation_that_is_ended_while_it_copies_leaves_nothing(pair: Rig, number: int) -> None:
    with faults.slow_node(pair, 1, rate="8mbit"):
        process = pair[0].popen(argv(pair, "nodeb"))
        wait_until(lambda: NAME in left(pair[1]), 30, "no copy has begun")
        # popen's process enters the node; dsdoctor is the one below it
        (inner,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(inner), number)
        out, _ = process.communicate(timeout=60)
    wait_until(lambda: left(pair[1]) == "", 30, "the folder of the copy is still there")

    assert found(pair[1]) == ""
    if number == signal.SIGINT:
        assert "the installation was interrupted at the step copy; nothing was installed" in out, out
