"""`dsdoctor wheel verify` from the file to the verdict: wheels made here, judged against recorded machines."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsdoctor.core.snapshot import Recorder
from dsdoctor.probe.paths import find_loadable
from dsdoctor.probe.python import Environment
from tests.builder.test_elf import fatbin
from tests.builder.test_wheel import INFO, NAME, RECORD, contents, wheel
from tests.cli.runner import run
from tests.conftest import PYTHON, Disk
from tests.machines.make import HERE

H100_TORCH_2_14 = HERE / "several-toolkits.json"
A100_TORCH_2_8 = HERE / "one-toolkit.json"


@dataclass(frozen=True)
class Built:
    """How the shared objects of a wheel are made."""

    flags: tuple[str, ...] = ("-mavx2",)
    architecture: int = 90


def with_gpu_code(library: Path, architecture: int = 90) -> bytes:
    """A shared object with a section as nvcc adds it."""
    (library.parent / "fat").write_bytes(fatbin((2, architecture)))
    added = ["objcopy", "--add-section", ".nv_fatbin=fat", library.name]
    subprocess.run(added, cwd=library.parent, check=True)
    return library.read_bytes()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[Built, bytes]:
    """Shared objects by gcc, with a section of GPU code as nvcc adds it."""
    made = {}
    for number, built in enumerate((Built(), Built(flags=("-mavx512f",)), Built(architecture=80))):
        folder = tmp_path_factory.mktemp(f"library{number}")
        (folder / "x.c").write_text("int f(int x) { return x + 1; }")
        gcc = ["gcc", "-g", "-shared", "-fPIC", "-march=x86-64", *built.flags, "-o", "x.so", "x.c"]
        subprocess.run(gcc, cwd=folder, check=True)
        made[built] = with_gpu_code(folder / "x.so", built.architecture)
    return made


def rules(path: Path, machine: Path) -> tuple[int, set[str]]:
    done = run("wheel", "verify", str(path), "--machine", str(machine), "--json")
    return done.returncode, {finding["rule"] for finding in json.loads(done.stdout)["findings"]}


def test_a_wheel_for_this_machine_is_accepted(libraries: dict[Built, bytes], tmp_path: Path) -> None:
    path = wheel(tmp_path, contents(libraries[Built()]))

    assert rules(path, H100_TORCH_2_14) == (0, set())
    shown = run("wheel", "verify", str(path), "--machine", str(H100_TORCH_2_14)).stdout
    assert "GPU code: 90_real" in shown
    *_, verdict, following = shown.splitlines()
    assert (verdict, following) == ("✓ it fits several-toolkits", f"  next: $ python -m pip install {path}")


def test_files_that_pip_would_put_beside_deepspeed_are_an_error(libraries: dict[Built, bytes], tmp_path: Path) -> None:
    evil = {"torch/__init__.py": b"", f"{INFO.replace('dist-info', 'data')}/scripts/python": b"#!python\n"}
    path = wheel(tmp_path, contents(libraries[Built()], **evil))

    assert rules(path, H100_TORCH_2_14) == (1, {"wheel-foreign-files"})


def test_a_wheel_that_says_it_is_another_and_takes_from_an_address_is_an_error(tmp_path: Path) -> None:
    metadata = b"Name: torch\nVersion: 99\nRequires-Dist: torch @ https://evil.example/x.whl\n"
    path = wheel(tmp_path, contents(b"no library", **{f"{INFO}/METADATA": metadata}))

    status, found = rules(path, H100_TORCH_2_14)

    assert (status, {"wheel-identity", "wheel-requires-address"} <= found) == (1, True)


def test_a_requirement_that_no_release_has_is_named(libraries: dict[Built, bytes], tmp_path: Path) -> None:
    files = contents(libraries[Built()])
    metadata = files[f"{INFO}/METADATA"].replace(b"\n\n", b"\nRequires-Dist: einops-evil\n\n")
    path = wheel(tmp_path, contents(libraries[Built()], **{f"{INFO}/METADATA": metadata}))

    assert rules(path, H100_TORCH_2_14) == (0, {"wheel-unusual"})
    assert "einops-evil" in run("wheel", "verify", str(path), "--machine", str(H100_TORCH_2_14)).stdout


@pytest.mark.slow
def test_a_pth_file_that_an_installed_deepspeed_brought_is_an_error(
    libraries: dict[Built, bytes], tmp_path: Path
) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    parts = {
        "deepspeed/__init__.py": b"",
        f"{INFO}/METADATA": f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {NAME.split('-')[1]}\n".encode(),
        f"{INFO}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}-{tag}-linux_x86_64\n".encode(),
        f"{INFO.replace('dist-info', 'data')}/scripts/ds_report": b"#!python\n",
    }
    said = {}
    for evil in ({}, {"evil.pth": b"import this_is_not_there\n"}):
        python = tmp_path / f"venv{len(evil)}" / "bin" / "python"
        made = wheel(tmp_path, contents(libraries[Built()], **parts, **evil), NAME.replace("cp311", tag))
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", python.parents[1]], check=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", made]
        subprocess.run(pip, check=True)
        document = json.loads(run("wheel", "verify", "--installed", "--python", str(python), "--json").stdout)
        assert document["built"]["version"] == NAME.split("-")[1]
        said[len(evil)] = [
            finding["title"] for finding in document["findings"] if finding["rule"] == "wheel-foreign-files"
        ]

    assert said[0] == []
    assert len(said[1]) == 1
    assert said[1][0].endswith("installed files that are not part of DeepSpeed: evil.pth")


def test_another_torch_another_cuda_and_another_gpu_are_refused(libraries: dict[Built, bytes], tmp_path: Path) -> None:
    path = wheel(tmp_path, contents(libraries[Built()]))

    assert rules(path, A100_TORCH_2_8) == (
        1,
        {"ops-torch-version-mismatch", "ops-cuda-version-mismatch", "no-kernel-image"},
    )


def test_an_avx512_wheel_on_a_lesser_processor_is_refused(libraries: dict[Built, bytes], tmp_path: Path) -> None:
    path = wheel(tmp_path, contents(libraries[Built(flags=("-mavx512f",))]))

    assert rules(path, H100_TORCH_2_14) == (1, {"cpu-isa-illegal-instruction"})


def test_gpu_code_for_another_major_is_refused(libraries: dict[Built, bytes], tmp_path: Path) -> None:
    path = wheel(tmp_path, contents(libraries[Built(architecture=80)]))

    assert rules(path, H100_TORCH_2_14) == (1, {"no-kernel-image"})


def test_a_wheel_that_links_what_the_machine_lacks_is_refused(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "x.c").write_text("int f(int x) { return x + 1; }")
    gcc = ["gcc", "-g", "-mavx2", "-shared", "-fPIC", "x.c", "-o"]
    subprocess.run([*gcc, "libaio.so", "-Wl,-soname,libaio.so.1"], cwd=tmp_path, check=True)
    subprocess.run([*gcc, "x.so", "-Wl,--no-as-needed", "-L.", "-laio"], cwd=tmp_path, check=True)
    path = wheel(tmp_path, contents(with_gpu_code(tmp_path / "x.so")))

    assert rules(path, H100_TORCH_2_14) == (0, set())  # an older snapshot does not know of libaio
    assert rules(path, asked_of_the_loader(disk, tmp_path, "libgomp.so.1")) == (1, {"shared-library-missing"})
    assert rules(path, asked_of_the_loader(disk, tmp_path, "libaio.so.1")) == (0, set())


def asked_of_the_loader(disk: Disk, folder: Path, soname: str) -> Path:
    """The snapshot of the H100 machine with the loader's answers of one that has a library."""
    path = f"/usr/lib64/{soname}"
    recorder = Recorder(disk({"/etc/ld.so.cache": f"\0/usr/lib64/libc.so.6\0{path}\0", path: ""}))
    find_loadable(recorder, Environment(python=PYTHON))
    snapshot = json.loads(H100_TORCH_2_14.read_bytes())
    snapshot["answers"] |= {q: a for q, a in recorder.snapshot.answers.items() if q.startswith(("search", "exists"))}
    file = folder / f"{soname}.json"
    file.write_text(json.dumps(snapshot))
    return file


def test_another_python_is_refused(libraries: dict[Built, bytes], tmp_path: Path) -> None:
    files = contents(libraries[Built()], **{f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nTag: cp310-cp310-linux_x86_64\n"})
    path = wheel(tmp_path, files, NAME.replace("cp311", "cp310"))

    assert rules(path, H100_TORCH_2_14) == (1, {"wheel-python-mismatch"})


def test_a_claimed_op_that_is_missing_is_refused(libraries: dict[Built, bytes], tmp_path: Path) -> None:
    claims = RECORD.replace("'utils': False", "'utils': True").encode()
    files = contents(libraries[Built()], **{"deepspeed/git_version_info_installed.py": claims})

    assert rules(wheel(tmp_path, files), H100_TORCH_2_14) == (1, {"claimed-op-missing"})


def test_a_wheel_without_ops_fits_and_it_is_said_for_whom(tmp_path: Path) -> None:
    said = RECORD.replace("True", "False").encode()
    files = contents(b"", **{"deepspeed/git_version_info_installed.py": said})
    lines = [line for line in files[f"{INFO}/RECORD"].splitlines() if b".so," not in line]
    none = {name: content for name, content in files.items() if not name.endswith(".so")}
    path = wheel(tmp_path, {**none, f"{INFO}/RECORD": b"\n".join(lines)})

    told = run("wheel", "verify", str(path), "--machine", str(HERE / "several-toolkits.json"))
    picked = run("wheel", "pick", str(tmp_path), "--machine", str(HERE / "several-toolkits.json"))

    assert "✓ it fits several-toolkits, for runs that need no op or compile it at its first use" in told.stdout
    assert "wheel-without-ops" in told.stdout
    assert "has no compiled ops" in picked.stdout


def test_a_wheel_that_is_none_leaves_one_error(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(b"PK\x03\x04 and then nothing")

    done = run("wheel", "verify", str(path), "--machine", str(H100_TORCH_2_14), "--json")

    assert (done.returncode, [f["rule"] for f in json.loads(done.stdout)["findings"]]) == (2, ["usage"])


@pytest.mark.slow
def test_nothing_of_a_wheel_is_run_where_it_is_verified_and_picked(tmp_path: Path) -> None:
    """Each module of it, a .pth file, and what a shared object runs when it is loaded would leave a file."""
    ran, source, built = tmp_path / "ran", tmp_path / "op.c", tmp_path / "op.so"
    source.write_text(f'#include <stdio.h>\n__attribute__((constructor)) void run(void) {{ fopen("{ran}", "w"); }}\n')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
    leaves = f"open({str(ran)!r}, 'w').close()\n".encode()
    held = contents(built.read_bytes())
    held |= {name: content + b"\n" + leaves for name, content in held.items() if name.endswith(".py")}
    held |= {"deepspeed/__init__.py": leaves, "deepspeed/ops/__init__.py": leaves, "evil.pth": b"import os; " + leaves}
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = wheel(folder, held)
    loaded = subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(built)!r})"], check=True)
    assert ran.exists(), f"else nothing was planted: {loaded}"
    ran.unlink()

    for words in (("wheel", "verify", str(path)), ("wheel", "pick", str(folder))):
        done = run(*words, "--machine", str(H100_TORCH_2_14), "--json")
        assert "Traceback" not in done.stderr
        assert str(path.name) in done.stdout
    assert not ran.exists()
