"""NVIDIA's archives from a server on this machine: manifests that lie, downloads that break, and a toolkit made of them."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request

import msgspec
import pytest

from dsdoctor.builder.toolkit.assemble import ask_nvidia, assemble
from dsdoctor.builder.toolkit.choose import BARE, choose_toolkit
from dsdoctor.builder.toolkit.download import _SafeRedirects, download, read_document
from dsdoctor.builder.toolkit.kept import DIGESTS, altered, read_mark, refuse_altered
from dsdoctor.builder.toolkit.plan_assembly import MARK, NvidiaRelease, Offers
from dsdoctor.core.build_models import Layer, ToolkitPlan
from dsdoctor.core.errors import BuildFailed, UsageError
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Cuda, Torch
from dsdoctor.core.requests import BuildRequest
from tests.builder.redist_server import PARTS, Server, release, serving
from tests.conftest import machine

CUDA = Cuda(12, 8)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(release()) as running:
        yield running


def host_of(server: Server) -> LocalHost:
    return LocalHost(env={**os.environ, "DSDOCTOR_CUDA_REDIST": server.address, "no_proxy": "*"})


def asked(server: Server, architecture: str = "x86_64") -> NvidiaRelease | str:
    return ask_nvidia(host_of(server), CUDA, architecture)


def planned(server: Server, tmp_path: Path) -> ToolkitPlan:
    """The plan for a torch of CUDA 12.8 without any toolkit, with the library headers that torch's wheels would bring."""
    nvidia = asked(server)
    assert isinstance(nvidia, NvidiaRelease)
    torch = Torch(version="2.8.0+cu128", location="", cuda=CUDA)
    plan, _, _ = choose_toolkit(
        machine(torch=torch), BuildRequest(), str(tmp_path / "cache"), BARE, Offers(nvidia=nvidia)
    )
    assert plan is not None
    wheels = tmp_path / "wheels"
    for name in ("nccl.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h", "curand_kernel.h", "cufile.h"):
        wheels.mkdir(exist_ok=True)
        (wheels / name).touch()
    return ToolkitPlan(**{**plan.__dict__, "fetch": (), "layers": (Layer(include=(str(wheels),), libraries=()),)})


def made(server: Server, plan: ToolkitPlan) -> tuple[Path, list[str]]:
    said: list[str] = []
    cc = "/usr/bin/gcc"
    home = assemble(host_of(server), plan, python="/no", architectures=("8.0",), compiler=cc, say=said.append)
    return home, said


def test_the_newest_patch_of_the_release_is_found(server: Server) -> None:
    server.files |= release("12.8.0") | release("12.9.0")

    found = asked(server)

    assert isinstance(found, NvidiaRelease)
    assert (found.label, found.release) == ("12.8.1", CUDA)
    assert [archive.name for archive in found.archives] == list(PARTS)
    assert [name for name, _ in server.asked] == [f"redistrib_12.8.{patch}.json" for patch in (0, 1, 2)]


@pytest.mark.parametrize(
    ("architecture", "why"), [("ppc64le", "no archives for ppc64le"), ("x86_64", "no archives of CUDA 12.8")]
)
def test_what_is_not_published_is_told(server: Server, architecture: str, why: str) -> None:
    server.files.clear()

    assert why in str(asked(server, architecture))


def test_who_cannot_be_reached_is_a_reason_and_no_error() -> None:
    with serving({}) as server:
        pass

    assert "cannot be reached" in str(asked(server))


def test_a_user_may_want_none_and_must_name_an_address() -> None:
    assert "disabled" in str(ask_nvidia(LocalHost(env={"DSDOCTOR_CUDA_REDIST": "none"}), CUDA, "x86_64"))
    with pytest.raises(UsageError, match="is not an address"):
        ask_nvidia(LocalHost(env={"DSDOCTOR_CUDA_REDIST": "/mirror"}), CUDA, "x86_64")


def test_a_folder_of_this_machine_can_be_the_mirror(tmp_path: Path) -> None:
    (tmp_path / "redistrib_12.8.1.json").write_bytes(release()["redistrib_12.8.1.json"])

    found = ask_nvidia(LocalHost(env={"DSDOCTOR_CUDA_REDIST": tmp_path.as_uri()}), CUDA, "x86_64")

    assert isinstance(found, NvidiaRelease)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("relative_path", "../../etc/x.tar.xz", "lies in"),
        ("relative_path", "/etc/x.tar.xz", "lies in"),
        ("relative_path", "http://elsewhere/x.tar.xz", "lies in"),
        ("relative_path", "a/..%2f..%2fx.tar.xz", "lies in"),
        ("relative_path", "cuda_nvcc/x.zip", "not a .tar.xz"),
        ("relative_path", None, "lies in|not a .tar.xz"),
        ("sha256", "", "no sha256"),
        ("sha256", "zz" * 32, "no sha256"),
        ("size", "-1", "bytes"),
        ("size", str(1 << 60), "bytes"),
        ("size", {"a": 1}, "bytes"),
    ],
)
def test_a_manifest_that_lies_is_not_taken(server: Server, field: str, value: Any, why: str) -> None:
    manifest = server.described()
    manifest["cuda_nvcc"]["linux-x86_64"][field] = value
    server.describe(manifest)

    answer = asked(server)

    assert isinstance(answer, str)
    assert any(part in answer for part in why.split("|"))


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff{", b"[" * 100_000, b'{"release_label": "11.0.0"}', b"<html>"])
def test_a_document_that_is_no_manifest_is_not_taken(server: Server, content: bytes) -> None:
    server.files["redistrib_12.8.1.json"] = content

    assert "was rejected" in str(asked(server))


def test_a_document_without_end_is_not_read_to_its_end(server: Server) -> None:
    server.files["big"] = b"x" * 5000

    with pytest.raises(OSError, match="larger than 1,000 bytes"):
        read_document(f"{server.address}/big", most=1000, timeout=5)


def test_a_server_that_sends_byte_by_byte_is_not_waited_for(server: Server) -> None:
    server.files["slow"], server.drips = b"x" * 50, True

    with pytest.raises(OSError, match="does not answer in time"):
        read_document(f"{server.address}/slow", most=1000, timeout=0.05)


def test_an_answer_that_leads_from_https_to_http_is_not_followed(server: Server) -> None:
    with pytest.raises(OSError, match="not https"):
        _SafeRedirects().redirect_request(Request("https://x/y"), None, 302, "", {}, "http://x/y")  # type: ignore[arg-type]


def test_a_password_in_the_address_reaches_only_its_server_and_no_message() -> None:
    with serving({}) as server:
        named = server.address.replace("http://", "http://me:secret@")
        server.redirect = server.address + "/elsewhere"
        answer = ask_nvidia(LocalHost(env={"DSDOCTOR_CUDA_REDIST": named, "no_proxy": "*"}), CUDA, "x86_64")

    assert "secret" not in str(answer)


@pytest.mark.slow
def test_a_toolkit_is_made_of_the_archives(server: Server, tmp_path: Path) -> None:
    plan = planned(server, tmp_path)

    home, said = made(server, plan)

    assert (home / "include/crt/host_config.h").exists()
    assert (home / "nvvm/bin/cicc").exists()
    assert "$(_HERE_)/.." in (home / "bin/nvcc.profile").read_text()
    assert not (home / "bin/nvcc").is_symlink()
    assert (home / "lib64/libcudart.so").resolve().name == "libcudart.so.12"
    assert any("docs.nvidia.com/cuda/eula" in line for line in said)
    assert any("MB/s" in line for line in said)
    assert not list((tmp_path / "cache/downloads").glob("*.xz*"))
    assert {(part.origin, part.name) for part in read_mark(home)} == {("nvidia", name) for name in PARTS}
    assert {part.sha256 for part in read_mark(home)} == {archive.sha256 for archive in plan.archives}


@pytest.mark.slow
def test_a_file_that_changed_since_then_is_noticed(server: Server, tmp_path: Path) -> None:
    plan = planned(server, tmp_path)
    home, _ = made(server, plan)
    refuse_altered(home)
    asked_before = len(server.asked)

    made(server, plan)
    assert len(server.asked) == asked_before
    (home.parent / "parts/cuda_cudart/include/cuda.h").write_text("changed")
    assert altered(home.parent) == ("parts/cuda_cudart/include/cuda.h",)
    with pytest.raises(BuildFailed, match=r"was modified after download: parts/cuda_cudart/include/cuda\.h"):
        refuse_altered(home)
    _, said = made(server, plan)

    assert any("is assembled again" in line for line in said)
    assert altered(home.parent) == ()


@pytest.mark.slow
def test_a_file_that_was_added_or_taken_away_is_noticed(server: Server, tmp_path: Path) -> None:
    home, _ = made(server, planned(server, tmp_path))

    (home.parent / "parts/cuda_nvcc/bin/ptxas").write_text("#!/bin/sh")
    (home.parent / "parts/cuda_nvcc/LICENSE").unlink()

    assert altered(home.parent) == ("parts/cuda_nvcc/LICENSE", "parts/cuda_nvcc/bin/ptxas")


@pytest.mark.slow
def test_a_toolkit_of_before_digests_were_kept_is_used_and_one_that_lost_them_is_not(
    server: Server, tmp_path: Path
) -> None:
    home, _ = made(server, planned(server, tmp_path))
    (home.parent / DIGESTS).unlink()

    with pytest.raises(BuildFailed, match="was modified after download"):
        refuse_altered(home)
    (home / MARK).write_text("cuda-toolkit[nvcc]==13.0.*\n")
    refuse_altered(home)


@pytest.mark.slow
def test_an_archive_of_another_digest_is_refused_and_nothing_is_left(server: Server, tmp_path: Path) -> None:
    plan = planned(server, tmp_path)
    path = plan.archives[0].path
    server.files[path] = server.files[path][:-1] + b"x"

    with pytest.raises(BuildFailed, match="does not match the manifest: its sha256 is"):
        made(server, plan)

    assert not Path(plan.root).parent.exists()
    assert not list((tmp_path / "cache/downloads").glob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "hostile",
    [
        {"../../escaped": "x"},
        {"bin/link": "-> /etc", "bin/link/passwd": "x"},
        {"bin/up": "-> ../../../.."},
    ],
)
def test_an_archive_that_reaches_outside_is_refused(server: Server, tmp_path: Path, hostile: dict[str, str]) -> None:
    server.files |= release(parts={**PARTS, "cuda_nvcc": {**PARTS["cuda_nvcc"], **hostile}})

    with pytest.raises(BuildFailed, match="reaches outside of it or is not a file"):
        made(server, planned(server, tmp_path))

    assert not list(tmp_path.rglob("escaped*"))
    assert not list((tmp_path / "cache/toolkits").glob("*/home"))


def test_a_broken_connection_is_continued(server: Server, tmp_path: Path) -> None:
    content = server.files["x.xz"] = os.urandom(50_000)
    server.breaks = 2
    said: list[str] = []

    fetch(server, tmp_path / "x", content, said)

    assert (tmp_path / "x").read_bytes() == content
    assert [wanted for _, wanted in server.asked] == ["", "bytes=25000-", "bytes=37500-"]
    assert any("resuming" in line for line in said)


@pytest.mark.parametrize("ranges", [True, False])
def test_what_a_killed_download_left_is_continued_or_begun_anew(server: Server, tmp_path: Path, ranges: bool) -> None:
    content = server.files["x.xz"] = os.urandom(9000)
    server.ranges = ranges
    (tmp_path / "x.part").write_bytes(content[:4000])

    fetch(server, tmp_path / "x", content, [])

    assert (tmp_path / "x").read_bytes() == content
    assert [wanted for _, wanted in server.asked] == ["bytes=4000-"]


def test_what_a_download_left_and_is_damaged_is_thrown_away(server: Server, tmp_path: Path) -> None:
    content = server.files["x.xz"] = os.urandom(9000)
    (tmp_path / "x.part").write_bytes(b"\0" * 4000)

    fetch(server, tmp_path / "x", content, [])

    assert (tmp_path / "x").read_bytes() == content


def test_a_file_of_this_machine_is_fetched_too(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"z" * 3000)
    (tmp_path / "here.part").write_bytes(b"z" * 1000)
    digest = hashlib.sha256(b"z" * 3000).hexdigest()

    download((tmp_path / "there").as_uri(), tmp_path / "here", sha256=digest, size=3000, name="x", say=print)
    with pytest.raises(BuildFailed, match="could not be fetched"):
        download((tmp_path / "none").as_uri(), tmp_path / "h", sha256=digest, size=3000, name="x", say=print)

    assert (tmp_path / "here").read_bytes() == b"z" * 3000


def test_a_planted_link_is_not_written_through(server: Server, tmp_path: Path) -> None:
    content = server.files["x.xz"] = b"y" * 100
    (tmp_path / "victim").write_text("")
    (tmp_path / "x.part").symlink_to(tmp_path / "victim")

    with pytest.raises(OSError):
        fetch(server, tmp_path / "x", content, [])
    assert (tmp_path / "victim").read_text() == ""


def test_one_that_never_comes_whole_is_an_error_with_a_next_step(server: Server, tmp_path: Path) -> None:
    server.files["x.xz"] = b"y" * 100
    server.files["long.xz"] = b"y" * 300

    with pytest.raises(BuildFailed, match="could not be fetched"):
        fetch(server, tmp_path / "x", b"y" * 200, [])
    with pytest.raises(BuildFailed, match="longer than the 200 bytes"):
        download(f"{server.address}/long.xz", tmp_path / "l", sha256="0" * 64, size=200, name="l", say=print)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_build_that_is_killed_leaves_no_half_toolkit(server: Server, tmp_path: Path, how: signal.Signals) -> None:
    plan = planned(server, tmp_path)
    toolkits, server.stalls = tmp_path / "cache/toolkits", True
    process = making(server, plan, tmp_path)
    assert server.stalled.wait(60)
    while not any(path.stat().st_size for path in (tmp_path / "cache/downloads").glob("*.part")):
        time.sleep(0.02)

    process.send_signal(how)
    process.communicate(timeout=60)
    server.stalls = False

    left = sorted(path.name for path in toolkits.iterdir() if path.is_dir())
    assert not Path(plan.root).parent.exists()
    assert len(left) == (how is signal.SIGKILL)  # and that one begins with a dot: no toolkit is looked for in it
    assert all(name.startswith(".") for name in left)
    part = next((tmp_path / "cache/downloads").glob("*.part")).stat().st_size

    home, _ = made(server, plan)

    assert (home / "bin/nvcc").exists()
    assert f"bytes={part}-" in [wanted for _, wanted in server.asked]
    assert [path.name for path in toolkits.iterdir() if path.is_dir()] == [home.parent.name]


@pytest.mark.slow
def test_a_disk_that_is_full_is_named(server: Server, tmp_path: Path) -> None:
    server.files |= release(parts={**PARTS, "cuda_nvcc": {**PARTS["cuda_nvcc"], "bin/cicc": "x" * 9_000_000}})
    plan = planned(server, tmp_path)
    mount = f"mount -t tmpfs -o size=4m none {tmp_path / 'cache'} && exec "
    try:
        process = making(server, plan, tmp_path, "unshare", "--mount", "sh", "-c", f'{mount} "$@"', "sh")
    except FileNotFoundError:
        pytest.skip("needs unshare")
    output, _ = process.communicate(timeout=60)
    if "mount:" in output or "unshare:" in output:
        assert os.environ.get("CI") != "true" or os.geteuid() != 0, "CI's root may mount"
        pytest.skip("needs a mount of its own")

    assert "the disk is full: " in output
    assert "MB free" in output
    assert process.returncode == 1


def making(server: Server, plan: ToolkitPlan, tmp_path: Path, *before: str) -> "subprocess.Popen[str]":
    """A process that assembles a toolkit."""
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    (tmp_path / "cache").mkdir(exist_ok=True)
    argv = [*before, sys.executable, "-m", "tests.builder.make_toolkit", str(tmp_path / "plan.json")]
    env = host_of(server).environment()
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def fetch(server: Server, target: Path, content: bytes, said: list[str]) -> None:
    digest = hashlib.sha256(content).hexdigest()
    download(f"{server.address}/x.xz", target, sha256=digest, size=len(content), name="x", say=said.append)
