"""The distribution's CUDA compiler by apt, without root: a small signed archive of packages on this machine."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dsdoctor.builder.toolkit.debian import (
    PACKAGE,
    Distribution,
    Mirror,
    ask_distribution,
    fetch_package,
    find_mirrors,
)
from dsdoctor.core.build_models import DebianPackage
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.host import LocalHost
from tests.builder.redist_server import Server, serving
from tests.conftest import Disk

NEEDED = ("apt-get", "dpkg-deb", "gpg", "gpgv")
VERSION = "12.4.131~12.4.1-2"
DEB_FILES = {
    f"usr/lib/{PACKAGE}/bin/nvcc": "#!/bin/sh\n",
    f"usr/lib/{PACKAGE}/bin/cicc": "#!/bin/sh\n",
    f"usr/lib/{PACKAGE}/bin/gcc": "#!/bin/sh\n",
    f"usr/lib/{PACKAGE}/bin/crt/link.stub": "stub",
    f"usr/lib/{PACKAGE}/libdevice/libdevice.10.bc": "bitcode",
    "usr/bin/nvcc": "#!/bin/sh\nexec /usr/lib/nvidia-cuda-toolkit/bin/nvcc\n",
    "usr/bin/ptxas": "#!/bin/sh\n",
    f"usr/share/doc/{PACKAGE}/copyright": "NVIDIA's terms",
}


def run(*argv: str | Path) -> None:
    subprocess.run([str(part) for part in argv], check=True, capture_output=True)


def a_deb(folder: Path) -> bytes:
    tree = folder / "tree"
    for name, text in DEB_FILES.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if text.startswith("#!") else 0o644)
    (tree / "usr/bin/cuobjdump").symlink_to("/etc/passwd")
    (tree / "DEBIAN").mkdir()
    control = f"Package: {PACKAGE}\nVersion: {VERSION}\nArchitecture: amd64\nMaintainer: x <x@x>\nDescription: x\n"
    (tree / "DEBIAN/control").write_text(control)
    run("dpkg-deb", "--build", "--root-owner-group", tree, folder / "x.deb")
    return (folder / "x.deb").read_bytes()


def a_key(folder: Path) -> Path:
    """A new signing key; its public half as a keyring."""
    home = folder / "gpg"
    home.mkdir(mode=0o700)
    gpg = ("gpg", "--homedir", home, "--batch", "--quiet")
    run(*gpg, "--passphrase", "", "--quick-generate-key", "archive@test", "ed25519", "sign")
    run(*gpg, "--output", folder / "keyring.gpg", "--export")
    return home


def a_release(folder: Path, key: Path, deb: bytes) -> dict[str, bytes]:
    """The signed index of an archive with one package, and the package."""
    pool = f"pool/{PACKAGE}_{VERSION}_amd64.deb"
    digest = hashlib.sha256(deb).hexdigest()
    packages = (
        f"Package: {PACKAGE}\nVersion: {VERSION}\nArchitecture: amd64\nFilename: {pool}\nSize: {len(deb)}\nSHA256: {digest}\n"
    ).encode()
    name = "non-free/binary-amd64/Packages"
    release = (
        "Origin: Debian\nSuite: trixie\nCodename: trixie\nArchitectures: amd64\nComponents: non-free\n"
        f"Date: Sun, 01 Nov 2026 00:00:00 UTC\nSHA256:\n {hashlib.sha256(packages).hexdigest()} {len(packages)} {name}\n"
    )
    (folder / "Release").write_text(release)
    signed = folder / "InRelease"
    run("gpg", "--homedir", key, "--batch", "--yes", "--clearsign", "--output", signed, folder / "Release")
    return {f"dists/trixie/{name}": packages, "dists/trixie/InRelease": signed.read_bytes(), pool: deb}


@dataclass
class Archive:
    """An archive of packages that runs; ``mirror`` is how dsdoctor would find it."""

    server: Server
    mirror: Mirror
    folder: Path


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archive]:
    if not all(map(shutil.which, NEEDED)):
        assert os.environ.get("CI") != "true", f"CI has {', '.join(NEEDED)}"
        pytest.skip(f"needs {', '.join(NEEDED)}")
    folder = tmp_path_factory.mktemp("archive")
    files = a_release(folder, a_key(folder), a_deb(folder))
    keyring = str(folder / "keyring.gpg")
    distribution = Distribution(
        name="Debian", identity="debian", keyrings=(keyring,), component="non-free", suites=("trixie",)
    )
    with serving(files) as server:
        mirror = Mirror(distribution=distribution, address=f"{server.address}/", keyring=keyring)
        yield Archive(server=server, mirror=mirror, folder=folder)
    subprocess.run(["gpgconf", "--homedir", folder / "gpg", "--kill", "all"], check=False)


def host(**env: str) -> LocalHost:
    return LocalHost(env={**os.environ, "no_proxy": "*", **env})


def offered(archive: Archive, apt: Path) -> DebianPackage:
    found = ask_distribution(host(), (archive.mirror,), apt, "x86_64")
    assert isinstance(found, tuple), found
    (package,) = found
    return package


@pytest.mark.slow
def test_a_package_is_found_fetched_and_laid_out_as_nvidias_own(archive: Archive, tmp_path: Path) -> None:
    said: list[str] = []
    apt, into = tmp_path / "a folder" / "apt", tmp_path / "part"

    package = offered(archive, apt)
    fetch_package(host(), package, apt, into, said.append)

    files = {path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()}
    assert (package.version, package.suite, package.distribution) == (VERSION, "trixie", "Debian")
    assert files == {
        *("bin/nvcc", "bin/ptxas", "bin/crt/link.stub", "nvvm/bin/cicc", "nvvm/libdevice/libdevice.10.bc", "LICENSE"),
    }
    assert "exec" not in (into / "bin/nvcc").read_text()
    assert any("100 %" in line for line in said)
    assert not list(tmp_path.glob("part.deb"))


@pytest.mark.slow
def test_an_index_that_the_distribution_did_not_sign_is_not_believed(archive: Archive, tmp_path: Path) -> None:
    a_key(tmp_path)
    stranger = replace(archive.mirror, keyring=str(tmp_path / "keyring.gpg"))

    # another mirror is tried first, as it would be
    found = ask_distribution(host(), (stranger,), tmp_path / "apt", "x86_64")

    assert isinstance(found, str)
    assert "NO_PUBKEY" in found or "not signed" in found
    subprocess.run(["gpgconf", "--homedir", tmp_path / "gpg", "--kill", "all"], check=False)


@pytest.mark.slow
def test_a_mirror_that_is_none_is_passed_over_for_the_next(archive: Archive, tmp_path: Path) -> None:
    nowhere = replace(archive.mirror, address=f"{archive.server.address}/nowhere/")

    found = ask_distribution(host(), (nowhere, archive.mirror), tmp_path / "apt", "x86_64")
    none = ask_distribution(host(), (nowhere,), tmp_path / "apt2", "x86_64")

    assert isinstance(found, tuple)
    assert isinstance(none, str)
    assert none.startswith("Debian's packages at http")


@pytest.mark.slow
def test_a_package_that_is_not_what_the_index_says_is_refused(archive: Archive, tmp_path: Path) -> None:
    package = offered(archive, tmp_path / "apt")
    pool = next(name for name in archive.server.files if name.startswith("pool/"))
    good = archive.server.files[pool]
    archive.server.files[pool] = good[:-1] + bytes([good[-1] ^ 1])
    try:
        with pytest.raises(BuildFailed, match=r"apt could not fetch nvidia-cuda-toolkit=.*Hash Sum mismatch"):
            fetch_package(host(), package, tmp_path / "apt", tmp_path / "part", lambda _: None)
    finally:
        archive.server.files[pool] = good
    with pytest.raises(BuildFailed, match="does not match Debian's index: its sha256 is"):
        fetch_package(host(), replace(package, sha256="0" * 64), tmp_path / "apt", tmp_path / "part", lambda _: None)
    assert not (tmp_path / "part").exists()


@pytest.mark.slow
def test_the_systems_hooks_and_pins_play_no_part(archive: Archive, tmp_path: Path) -> None:
    touched, pins = tmp_path / "touched", tmp_path / "pins"
    pins.write_text(f"Package: {PACKAGE}\nPin: version *\nPin-Priority: -1\n")
    settings = tmp_path / "system.conf"
    settings.write_text(
        f'APT::Update::Pre-Invoke {{ "touch {touched}"; }};\nAPT::Update::Post-Invoke {{ "touch {touched}"; }};\n'
        f'Dir::Etc::Preferences "{pins}";\nAcquire::AllowInsecureRepositories "true";\n'
    )

    found = ask_distribution(host(APT_CONFIG=str(settings)), (archive.mirror,), tmp_path / "apt", "x86_64")

    assert isinstance(found, tuple)
    assert not touched.exists()


def test_a_system_without_apt_or_of_another_kind_has_no_mirror(disk: Disk) -> None:
    tools = {"/usr/bin/apt-get": "#!/bin/sh\n", "/usr/bin/dpkg-deb": "#!/bin/sh\n"}

    assert find_mirrors(disk({}, PATH="/usr/bin")) == "there is no apt-get and dpkg-deb here"
    assert "neither Debian nor Ubuntu" in str(
        find_mirrors(disk({**tools, "/etc/os-release": "ID=alpine\n"}, PATH="/usr/bin"))
    )


def test_ubuntu_is_like_debian_and_is_asked_by_its_own_keyring_and_mirror(disk: Disk) -> None:
    mirror = "http://m.example/ubuntu/dists/noble/InRelease"
    here = disk(
        {
            "/usr/bin/apt-get": f"#!/bin/sh\necho \"'{mirror}' x 0\"\n",
            "/usr/bin/dpkg-deb": "#!/bin/sh\n",
            "/etc/os-release": "ID=ubuntu\nID_LIKE=debian\n",
            "/usr/share/keyrings/debian-archive-keyring.gpg": "",
            "/usr/share/keyrings/ubuntu-archive-keyring.gpg": "",
        },
        PATH="/usr/bin",
    )

    found = find_mirrors(here)

    assert isinstance(found, tuple)
    (one,) = found
    assert (one.distribution.name, one.address) == ("Ubuntu", "http://m.example/ubuntu/")
