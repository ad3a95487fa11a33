"""The real Dockerfile, built with buildah on a Debian made here: what comes out works, and what cannot be built says why."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.compose import services
from tests.docker.conftest import PYTHON, ROOT, SECRET, Workshop

pytestmark = pytest.mark.docker
IMAGE, OP = "localhost/dsdoctor:test", "pin_memory"


@pytest.fixture(scope="module")
def out(workshop: Workshop) -> Path:
    """The folder with the wheel of an image that was built."""
    folder = workshop.folder / "out"
    done = workshop.build("--tag", IMAGE, "--ops", OP, "--arch", "9.0", "--out", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    compared = re.findall(r"(\d+) of (\d+) files have the sha256 that was recorded(.*)", done.stderr)
    # torch for this machine and what was made in the image have none; all pins have one
    assert sum(int(same) for same, _, _ in compared) > 20, compared
    assert not re.search(r"recorded of .*(numpy|ninja|pydantic|rich)", str(compared)), compared
    return folder


@pytest.fixture
def container(workshop: Workshop, out: Path) -> Iterator[str]:
    name = workshop.run("buildah", "from", "--pull-never", IMAGE).stdout.strip()
    yield name
    workshop.run("buildah", "rm", name)


def test_the_image_passes_its_own_smoke_test(workshop: Workshop, out: Path) -> None:
    done = workshop.run("ci/smoke-image", IMAGE, "--engine", "buildah", "--ops", OP)

    assert done.returncode == 0, done.stdout
    assert done.stdout.count("\n✓ ") >= 7
    assert "2 of 2 ranks reach each other" in done.stdout


def test_an_op_that_is_not_in_the_image_fails_its_smoke_test(workshop: Workshop, out: Path) -> None:
    done = workshop.run("ci/smoke-image", IMAGE, "--engine", "buildah", "--ops", "cpu_adam")

    assert done.returncode == 1
    assert "✗ dsdoctor check --op cpu_adam" in done.stdout


def test_the_images_labels_are_the_manifests_facts(workshop: Workshop, out: Path) -> None:
    (manifest,) = (json.loads(path.read_text()) for path in out.glob("*.json"))
    told = json.loads(workshop.run("buildah", "inspect", "--type", "image", IMAGE).stdout)
    labels = told["OCIv1"]["config"]["Labels"]

    assert labels["dsdoctor.wheel.sha256"] == manifest["sha256"]
    assert labels["dsdoctor.torch"] == manifest["torch"]
    assert (labels["dsdoctor.ops"], labels["dsdoctor.accelerator"]) == (OP, "cpu")
    assert labels["dsdoctor.processor"] == ("x86-64-v3" if platform.machine() == "x86_64" else "native")


def test_no_secret_no_compiler_and_no_cache_is_in_the_image(workshop: Workshop, container: str) -> None:
    mounted = Path(workshop.run("buildah", "mount", container).stdout.strip())
    told = workshop.run("buildah", "inspect", "--type", "image", IMAGE).stdout
    config = json.loads(told)["OCIv1"]["config"]
    found = workshop.run("grep", "-rlF", SECRET, mounted, "--exclude-dir=proc", "--exclude-dir=sys").stdout

    assert found == ""
    assert SECRET not in told
    for pattern in (
        "run/secrets/*",
        "root/.cache/*/*",
        "var/lib/apt/lists/*Packages*",
        "var/cache/apt/*.bin",
        "usr/bin/*g++*",
    ):
        assert not list(mounted.glob(pattern)), pattern
    assert not [entry for entry in config["Env"] if entry.startswith(("DS_", "PIP_", "SSL_", "CCACHE_"))]
    assert config["User"] == "10001:10001"
    assert not config.get("Entrypoint")
    assert "Healthcheck" not in config


def test_another_wheel_makes_another_image_although_its_layers_are_kept(
    workshop: Workshop, out: Path, tmp_path: Path
) -> None:
    second = "localhost/dsdoctor:second"
    # an op without vector code: this changes nothing but what the manifest says of it
    done = workshop.build("--tag", second, "--ops", OP, "--cpu", "x86-64-v2", "--out", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        manifest = file.read(next(name for name in file.namelist() if name.endswith("/dsdoctor.json")))
    name = workshop.run("buildah", "from", "--pull-never", second).stdout.strip()
    mounted = Path(workshop.run("buildah", "mount", name).stdout.strip())
    (installed,) = mounted.glob("opt/venv/lib/python*/site-packages/deepspeed-*.dist-info/dsdoctor.json")

    assert b'"processor": "x86-64-v2"' in manifest
    assert installed.read_bytes() == manifest


def test_the_two_containers_of_the_compose_file_train(workshop: Workshop, container: str) -> None:
    ranks = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for command, variables in services("train").values():
        variables = {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        given = [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]
        script = f"{ROOT}/docker/train.py:{command[-1]}:ro"
        argv = ["buildah", "run", "--hostname", "localhost", "--volume", script, *given, container, "--", *command]
        ranks.append(subprocess.Popen(argv, env=workshop.environment, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=300)[0] for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "2 ranks" in "".join(said)


def test_the_wheel_of_the_image_installs_and_loads_outside_of_it(workshop: Workshop, out: Path) -> None:
    if f"{sys.version_info.major}.{sys.version_info.minor}" != PYTHON:
        pytest.skip(f"the image's wheel is for Python {PYTHON}")
    argv = ["ci/test-wheels", str(out), "--python", sys.executable]
    env = {**os.environ, "PIP_FIND_LINKS": str(workshop.wheels)}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)

    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "✓ 1 of 1 ops load" in done.stdout


@pytest.mark.parametrize(
    ("options", "more", "sentence"),
    [
        (("--ops", "pin_memori"), (), "✗ unknown op 'pin_memori': DeepSpeed"),
        (("--ops", "deepspeed_ccl_comm"), (), "✗ deepspeed_ccl_comm cannot be built: "),
        (("--arch", "sm_90"), (), "✗ architecture 'sm_90' is nvcc's spelling, torch and DeepSpeed read '9.0'"),
        ((), ("--build-arg", "ARCH="), "✗ the architecture list is empty"),
        (("--accelerator", "cuda"), (), "✗ --accelerator cuda needs a CUDA build of torch; torch"),
        pytest.param(
            *(("--deepspeed", "99.0"), (), "✗ pip could not fetch the sdist of deepspeed==99.0"),
            marks=pytest.mark.exhaustive,
        ),
        (("--torch", "9.9.9"), (), "✗ no index here has torch==9.9.9 for Python 3.11"),
        (
            (),
            (
                "--no-cache",
                "--build-arg",
                "http_proxy=http://127.0.0.1:9",
                "--build-arg",
                "https_proxy=http://127.0.0.1:9",
            ),
            "✗ apt-get reaches no package index: this build has no network, or needs a proxy",
        ),
    ],
    ids=["unknown op", "impossible op", "malformed arch", "no arch", "accelerator", "DeepSpeed", "torch", "network"],
)
def test_what_cannot_be_built_says_why_and_leaves_no_image(
    options: tuple[str, ...], more: tuple[str, ...], sentence: str, workshop: Workshop, out: Path, tmp_path: Path
) -> None:
    named = ("--tag", "localhost/dsdoctor:broken", "--ops", OP, "--arch", "9.0", "--out", tmp_path / "dist")
    done = workshop.build(*named, *options, more=more)

    assert done.returncode == 1
    told = done.stderr.rpartition("ci/build-image: the build failed, and there is no wheel")[2]
    assert told.strip().startswith(sentence)
    assert "Fix: " in told
    assert "localhost/dsdoctor:broken" not in workshop.images()
    assert not list((tmp_path / "dist").iterdir())


def test_a_proxy_with_a_login_is_used_and_stays_in_no_log(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "proxy").write_text(
        f"http_proxy=http://user:{SECRET}@127.0.0.1:9\nhttps_proxy=http://user:{SECRET}@127.0.0.1:9\n"
    )
    named = ("--tag", "localhost/dsdoctor:broken", "--proxy", tmp_path / "proxy")
    done = workshop.build(*named, "--out", tmp_path / "dist", more=("--no-cache",))

    assert done.returncode == 1
    assert "✗ apt-get reaches no package index: this build has no network, or needs a proxy" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert "localhost/dsdoctor:broken" not in workshop.images()


UNLOADABLE = """#pragma once
extern "C" { int mlock(const void*, unsigned long); int munlock(const void*, unsigned long); int of_nowhere(); }
static int called = of_nowhere();
"""


@pytest.mark.parametrize(
    ("header", "arch", "words"),
    [
        ("#error broken on purpose\n", "8.0", "#error broken on purpose"),
        pytest.param(UNLOADABLE, "8.6", "it does not load with this torch: ", marks=pytest.mark.exhaustive),
    ],
    ids=["does not compile", "is not proven"],
)
def test_an_op_that_is_no_good_makes_no_image(
    header: str, arch: str, words: str, workshop: Workshop, out: Path, tmp_path: Path
) -> None:
    # a mounted file is no part of a layer's key: another --arch, which changes nothing else, has the layer made anew
    path = tmp_path / "mman.h"
    path.write_text(header)
    over = ("--volume", f"{path}:/usr/include/x86_64-linux-gnu/sys/mman.h:ro")

    done = workshop.build("--ops", OP, "--arch", arch, "--out", tmp_path / "dist", more=over)

    assert done.returncode == 1
    told = done.stderr.rpartition("ci/build-image: the build failed, and there is no wheel")[2]
    assert "✗ pin_memory" in told
    assert words in told
    assert not list((tmp_path / "dist").iterdir())
