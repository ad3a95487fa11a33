"""docker/install.py with the real pip and an index made here: what was recorded is compared, and what differs is not installed."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[2] / "docker"


@dataclass(frozen=True)
class Place:
    """A folder with install.py and its records, an index, and where pip installs to."""

    folder: Path

    def wheel(self, name: str, version: str, *needs: str, content: bytes = b"") -> Path:
        """A wheel beside the index, as a file alone."""
        path, info = self.folder / "files" / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
        path.parent.mkdir(exist_ok=True)
        asked = "".join(f"Requires-Dist: {need}\n" for need in needs)
        files = {
            f"{name}.py": content,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{asked}".encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: here\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        with zipfile.ZipFile(path, "w") as file:
            for inside, data in files.items():
                file.writestr(inside, data)
            file.writestr(f"{info}/RECORD", "".join(f"{inside},,\n" for inside in files))
        return path

    def offer(self, wheel: Path, *, digest: str | None = None) -> None:
        """List a wheel in the index, with its sha256 or another, or "" for none."""
        page = self.folder / "index" / wheel.name.partition("-")[0] / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        anchor = f"#sha256={of(wheel) if digest is None else digest}" if digest != "" else ""
        page.write_text(f'<a href="{wheel.as_uri()}{anchor}">{wheel.name}</a>')

    def record(self, **digests: str) -> None:
        """What the two files say of ``name==1.0``."""
        lines = [
            f"{name}==1.0 ; python_version >= '3' \\\n    --hash=sha256:{digest}\n" for name, digest in digests.items()
        ]
        (self.folder / "constraints.txt").write_text("# pins\n" + "".join(lines))

    def install(self, *arguments: str, **variables: str) -> tuple[int, str, set[str]]:
        """The exit status, what was said, and the modules that were installed."""
        index = (self.folder / "index").as_uri()
        own = {"PIP_INDEX_URL": index, "PIP_TARGET": str(self.folder / "target"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        argv = [sys.executable, str(self.folder / "install.py"), *arguments]
        env = {**kept, **own, "PIP_CONFIG_FILE": os.devnull, **variables}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
        installed = {path.stem for path in (self.folder / "target").glob("*.py")}
        return done.returncode, done.stdout + done.stderr, installed


def of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    shutil.copy(DOCKER / "install.py", tmp_path)
    (tmp_path / "torch.sha256").write_text("")
    made = Place(tmp_path)
    made.record()
    return made


@pytest.mark.slow
def test_a_requirement_and_what_it_needs_are_installed_by_the_recorded_sha256(place: Place) -> None:
    needed, top = place.wheel("needed", "1.0"), place.wheel("top", "1.0", "needed")
    place.offer(needed)
    place.offer(top)
    place.record(needed=of(needed), top=of(top))

    status, told, installed = place.install("top")

    assert (status, installed) == (0, {"needed", "top"})
    assert "2 of 2 files have the sha256 that was recorded\n" in told


@pytest.mark.slow
def test_another_file_of_a_recorded_release_is_refused_and_nothing_is_installed(place: Place) -> None:
    needed, top = place.wheel("needed", "1.0"), place.wheel("top", "1.0", "needed")
    place.offer(top)
    place.record(needed=of(needed), top=of(top))
    # the index is consistent: it offers another file, with that file's sha256
    place.offer(place.wheel("needed", "1.0", content=b"import evil"))

    status, told, installed = place.install("top")

    assert (status, installed) == (1, set())
    assert "✗ needed-1.0-py3-none-any.whl has the sha256 " in told
    assert "recorded for needed==1.0\n    Fix: " in told


@pytest.mark.slow
def test_a_file_that_is_not_what_its_index_says_is_refused(place: Place) -> None:
    place.offer(place.wheel("top", "1.0"), digest="0f" * 32)

    status, _, installed = place.install("top")

    assert (status, installed) == (1, set())


@pytest.mark.slow
@pytest.mark.parametrize("digest", [None, ""], ids=["with its sha256", "with none"])
def test_what_nobody_recorded_is_installed_and_named(place: Place, digest: str | None) -> None:
    top = place.wheel("top", "1.0", "local")
    place.offer(top, digest=digest)

    status, told, installed = place.install(str(place.wheel("local", "2.0")), "top")

    assert (status, installed) == (0, {"local", "top"})
    assert told.splitlines()[-1].startswith("0 of 2 files have the sha256 that was recorded; nothing was recorded of ")
    assert {"local==2.0", "top==1.0"} == set(told.splitlines()[-1].partition("recorded of ")[2].split(", "))


@pytest.mark.slow
def test_a_pip_that_cannot_plan_installs_as_always_and_that_is_said(place: Place) -> None:
    old = place.folder / "old" / "pip"
    old.mkdir(parents=True)
    (old / "__init__.py").write_text("")
    (old / "__main__.py").write_text(
        "import sys\nprint('pip 22.0.2 from' if '--version' in sys.argv else sys.argv[1:])\n"
    )

    status, told, _ = place.install("--extra-index-url", "https://host.example", "top", PYTHONPATH=str(old.parent))

    assert status == 0
    assert "pip 22.0.2 cannot say beforehand what it installs: no sha256 was compared" in told
    assert "['install', '--extra-index-url', 'https://host.example', 'top']" in told


def test_every_pin_of_the_image_has_a_sha256_and_pip_reads_the_pins_without_them() -> None:
    text = (DOCKER / "constraints.txt").read_text()
    pins = [line for line in text.splitlines() if "==" in line]
    told = subprocess.run(
        ["sed", "-E", r"s/ *(\\|--hash=.*)$//; /^ *$/d", str(DOCKER / "constraints.txt")],
        capture_output=True,
        text=True,
    )
    expected = [line.removesuffix(" \\") for line in text.splitlines() if not line.startswith("    --hash=sha256:")]

    assert r"s/ *(\\|--hash=.*)$//; /^ *$/d" in (DOCKER / "step").read_text()
    assert told.stdout.splitlines() == expected
    assert len(pins) > 30
    for part in text.replace("\\\n", " ").splitlines():
        assert part.startswith("#") or "--hash=sha256:" in part, part


def test_the_torch_of_the_dockerfile_has_a_sha256() -> None:
    (version,) = [
        line.partition("=")[2]
        for line in (DOCKER / "Dockerfile").read_text().splitlines()
        if line.startswith("ARG TORCH_VERSION=")
    ]

    assert f"\ntorch=={version} --hash=sha256:" in (DOCKER / "torch.sha256").read_text()
