"""A Debian made here and a store of images of the tests' own: no engine, no registry, nothing left behind."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
IN_CI = os.environ.get("CI") == "true"
SUITE, PYTHON = "bookworm", "3.11"
SECRET = "a-token-of-the-private-index"
CA = "/etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """Where images are built: ``environment`` is the builder's, ``base`` a Debian in its store, ``torch`` the version that
    ``wheels`` holds for that Debian's Python."""

    folder: Path
    environment: Mapping[str, str]
    base: str
    wheels: Path
    torch: str

    def run(self, *argv: object, timeout: float = 1500) -> subprocess.CompletedProcess[str]:
        """A command in the checkout; what it says goes to the test's report."""
        done = subprocess.run(
            list(map(str, argv)), cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout
        )
        sys.stderr.write(f"$ {' '.join(map(str, argv))}\n{done.stdout}\n{done.stderr[-8000:]}\n")
        return done

    def build(self, *options: object, more: tuple[object, ...] = ()) -> subprocess.CompletedProcess[str]:
        """``ci/build-image`` on the Debian made here; ``options`` come last and win."""
        pip_conf = self.folder / "pip.conf"
        pip_conf.write_text(f"[global]\n# https://u:p@{SECRET}@h/simple?token={SECRET}\nfind-links = /run/wheels\n")
        authority = ("--ca", CA) if Path(CA).exists() else ()
        fixed = ("--engine", "buildah", "--base", self.base, "--torch", self.torch, "--accelerator", "cpu", *authority)
        tail = ("--", "--volume", f"{self.wheels}:/run/wheels:ro", *more)
        return self.run("ci/build-image", *fixed, "--pip-conf", pip_conf, *options, *tail)

    def images(self) -> set[str]:
        """The names of the images in the store."""
        told = self.run("buildah", "images", "--format", "{{.Name}}:{{.Tag}}", "--noheading").stdout
        return {line for line in told.split() if "<none>" not in line}


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    lacking = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool, path=_path()) is None]
    if lacking or os.geteuid() != 0:
        assert not IN_CI, f"CI installs {lacking} and runs as root"
        pytest.skip(f"needs root, buildah and debootstrap; not here: {', '.join(lacking) or 'root'}")
    folder = tmp_path_factory.mktemp("images")
    environment = _environment(folder)
    torch = next(
        line.partition("==")[2].strip()
        for line in (ROOT / "ci" / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    try:
        base = _debian(folder, environment)
        wheels = _fetched(folder, torch)
        yield Workshop(folder=folder, environment=environment, base=base, wheels=wheels, torch=torch)
    finally:
        subprocess.run(["buildah", "rm", "--all"], env=environment, capture_output=True)
        subprocess.run(["buildah", "rmi", "--all", "--force"], env=environment, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _environment(folder: Path) -> dict[str, str]:
    """The builder's: its store, and with TMPDIR its cache mounts, lie in the folder."""
    configuration = folder / "storage.conf"
    configuration.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n', encoding="utf-8"
    )
    (folder / "tmp").mkdir()
    own = {"CONTAINERS_STORAGE_CONF": str(configuration), "BUILDAH_ISOLATION": "chroot", "PATH": _path()}
    # what the shell of whoever builds an image holds does not get into it
    planted = {
        "CFLAGS": f"-DTOKEN={SECRET}",
        "NVCC_APPEND_FLAGS": f'-DTOKEN="a {SECRET}"',
        "DS_BUILD_STRING": f"+{SECRET}",
    }
    return {**os.environ, **own, **planted, "TMPDIR": str(folder / "tmp")}


def _debian(folder: Path, environment: Mapping[str, str]) -> str:
    """The smallest Debian, from the mirror that this machine itself uses."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(SUITE)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    mirrors = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == [SUITE]]
    tree = folder / "debian"
    argv = ["debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, str(tree), *mirrors[:1]]
    subprocess.run(argv, env=environment, check=True, stdout=subprocess.DEVNULL)
    for downloaded in (tree / "var" / "cache" / "apt" / "archives").glob("*.deb"):
        downloaded.unlink()
    name = "localhost/debian:here"

    def buildah(*arguments: str) -> str:
        return subprocess.run(
            ["buildah", *arguments], env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(tree), "/")
    buildah("commit", "--quiet", "--rm", container, name)
    shutil.rmtree(tree)
    return name


def _fetched(folder: Path, torch: str) -> Path:
    """torch for the Python of that Debian, by this machine's own pip: the CPU build where its indexes have one."""
    wheels = folder / "wheels"
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    argv += ["--python-version", PYTHON, "--dest", str(wheels), f"torch=={torch}"]
    subprocess.run(argv, check=True, env={name: v for name, v in os.environ.items() if name != "PIP_CONSTRAINT"})
    return wheels
