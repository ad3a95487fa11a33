"""Wheels made here, healthy, foreign, damaged and malicious: read, never run."""

import base64
import hashlib
import io
import json
import os
import stat
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsdoctor.builder.make.manifest import EARLIEST, Manifest, write_into
from dsdoctor.builder.wheel.read import read_installed, read_wheel
from dsdoctor.core.build_models import BuildPlan
from dsdoctor.core.deepspeed_install import deepspeed_of_record, with_manifest, with_tags
from dsdoctor.core.errors import UsageError
from dsdoctor.core.machine import DeepSpeed
from tests.core.test_zip_file import two_faced
from tests.each import each

VERSION = "0.19.8+cu13.0.torch2.14"
NAME = f"deepspeed-{VERSION}-cp311-cp311-linux_x86_64.whl"
RECORD = (
    "version='0.19.8+cu13.0.torch2.14'\ninstalled_ops={'cpu_adam': True, 'fused_adam': True, 'utils': False}\n"
    "accelerator_name='cuda'\ntorch_info={'version': '2.14', 'cuda_version': '13.0', 'bf16_support': True}\n"
    "raise SystemExit('executed')\n"
)
INFO = "deepspeed-0.19.8+cu13.0.torch2.14.dist-info"
DATA = "deepspeed-0.19.8+cu13.0.torch2.14.data"
METADATA = (
    b"Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8+cu13.0.torch2.14\nRequires-Dist: torch\n\nIt trains.\n"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A shared object as gcc makes it, with debug information."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "x.c").write_text('#include <stdio.h>\nint f(void) { return puts("x"); }')
    argv = ["gcc", "-g", "-shared", "-fPIC", "-march=x86-64", "-mavx2", "-o", "x.so", "x.c"]
    subprocess.run(argv, cwd=folder, check=True)
    return (folder / "x.so").read_bytes()


def contents(library: bytes, *, version: str = VERSION, **more: bytes) -> dict[str, bytes]:
    """The files of a wheel of that version."""
    info = INFO.replace(VERSION, version)
    files = {
        "deepspeed/ops/adam/cpu_adam_op.cpython-311-x86_64-linux-gnu.so": library,
        "deepspeed/ops/adam/fused_adam_op.cpython-311-x86_64-linux-gnu.so": library,
        "deepspeed/git_version_info_installed.py": RECORD.encode(),
        f"{info}/METADATA": METADATA.replace(VERSION.encode(), version.encode()),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nTag: cp311-cp311-linux_x86_64\n",
    }
    files |= more
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in files.items()
    ]
    return files | {f"{info}/RECORD": "\n".join([*lines, f"{info}/RECORD,,"]).encode()}


def wheel(folder: Path, files: dict[str, bytes], name: str = NAME) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for inside, data in files.items():
            file.writestr(inside, data)
    return path


def test_a_wheel_of_anybody_tells_what_it_is(library: bytes, tmp_path: Path) -> None:
    facts = read_wheel(wheel(tmp_path, contents(library)))

    assert (facts.version, facts.accelerator, facts.torch, facts.cuda) == (
        "0.19.8+cu13.0.torch2.14",
        "cuda",
        "2.14",
        "13.0",
    )
    assert facts.installed_ops == facts.present_ops == ("cpu_adam", "fused_adam")
    assert (facts.python, facts.platform, facts.altered, facts.told_by) == (("cp311",), ("linux_x86_64",), (), "files")
    assert {"-march=x86-64", "-mavx2"} <= set(facts.cpu_flags)
    assert facts.glibc is not None


def test_claims_and_contents_are_two_things(library: bytes, tmp_path: Path) -> None:
    files = contents(library)
    del files["deepspeed/ops/adam/fused_adam_op.cpython-311-x86_64-linux-gnu.so"]
    files["deepspeed/ops/lamb/fused_lamb_op.so"] = library

    facts = read_wheel(wheel(tmp_path, files))

    assert (facts.present_ops, facts.unclaimed) == (("cpu_adam",), ("fused_lamb_op",))
    assert facts.altered == (
        "deepspeed/ops/adam/fused_adam_op.cpython-311-x86_64-linux-gnu.so",
        "deepspeed/ops/lamb/fused_lamb_op.so",
    )


def test_bytes_that_are_not_the_recorded_ones_are_named(library: bytes, tmp_path: Path) -> None:
    files = contents(library)
    files["deepspeed/git_version_info_installed.py"] += b"# changed\n"
    path = wheel(tmp_path, files)
    path.with_name(path.name + ".json").write_text(json.dumps({"sha256": "0" * 64}))

    assert read_wheel(path).altered == (NAME, "deepspeed/git_version_info_installed.py")


def test_the_name_of_a_wheel_and_its_tags_must_agree(library: bytes, tmp_path: Path) -> None:
    facts = read_wheel(wheel(tmp_path, contents(library), NAME.replace("cp311", "cp312")))

    assert (facts.python, facts.altered) == (("cp312",), ("the tags of its name or its WHEEL file",))


def test_a_damaged_shared_object_and_a_wheel_without_record_are_said(library: bytes, tmp_path: Path) -> None:
    op = "deepspeed/ops/adam/cpu_adam_op.cpython-311-x86_64-linux-gnu.so"
    files = contents(library) | {op: library[: len(library) // 2]}
    del files[f"{INFO}/RECORD"]

    facts = read_wheel(wheel(tmp_path, files))

    assert facts.unreadable == (op,)
    assert facts.altered == ("RECORD, which is missing",)


def with_record(files: dict[str, bytes], more: bytes) -> dict[str, bytes]:
    return files | {f"{INFO}/RECORD": files[f"{INFO}/RECORD"] + b"\n" + more}


@each(
    "name, rows, is_foreign",
    [
        ("torch/__init__.py", b"torch/__init__.py,,", True),
        ("../../../precious.txt", b"../../../precious.txt,,", True),
        ("../../../bin/pip", b"../../../bin/pip,,", True),
        ("/etc/passwd", b"/etc/passwd,,", True),
        ("evil.pth", b"deepspeed/ops/adam/x.py,,\revil.pth,,", True),
        ("deepspeed/left.py", b"deepspeed/left.py,,", False),
        ("deepspeed/git_version_info_installed.py", b"deepspeed/git_version_info_installed.py,,", False),
        ("RECORD, which cannot be read", b'"' + b"x" * 140_000 + b'",,', False),
    ],
)
def test_what_a_record_lists_and_the_wheel_does_not_hold_is_named(
    name: str, rows: bytes, is_foreign: bool, library: bytes, tmp_path: Path
) -> None:
    """Who uninstalls it, as each upgrade does, removes what RECORD lists."""
    facts = read_wheel(wheel(tmp_path, with_record(contents(library), rows)))

    assert name in facts.altered
    assert (name in facts.foreign) is is_foreign


@each(
    "more, told",
    [
        ({f"{DATA}/purelib/deepspeed/git_version_info_installed.py": b"import evil"}, "installs"),
        ({f"{DATA}/platlib/Deepspeed/git_version_info_installed.py": b"import evil"}, "installs"),
        ({f"{DATA}/purelib/deepspeed/x.py": b"", f"{DATA}/platlib/deepspeed/x.py": b""}, "installs"),
        ({"deepspeed/foo": b"", "deepspeed/foo/x": b""}, "as the folder of"),
        ({"deepspeed/foo": b"", f"{DATA}/purelib/deepspeed/foo/x": b""}, "as the folder of"),
    ],
)
def test_a_file_that_is_installed_over_another_is_refused(
    more: dict[str, bytes], told: str, library: bytes, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=told):
        read_wheel(wheel(tmp_path, contents(library, **more)))


def test_what_a_data_folder_adds_is_the_wheels(library: bytes, tmp_path: Path) -> None:
    facts = read_wheel(wheel(tmp_path, contents(library, **{f"{DATA}/purelib/deepspeed/x.py": b""})))

    assert (facts.altered, facts.foreign) == ((), ())


@each(
    "name, content, told",
    [
        ("METADATA", METADATA + b"\xff", "METADATA is not UTF-8"),
        ("METADATA", METADATA.replace(b"\n\n", b"\nRequires-Python: >=3.99\n\n"), "the file name says cp311"),
        ("METADATA", METADATA.replace(b"\n\n", b"\nRequires-Python: x\n\n"), "'x', which is not a valid one"),
        ("METADATA", METADATA.replace(b"Dist: torch", b"Dist: !!!"), "'!!!', which is not a valid requirement"),
        ("METADATA", METADATA.replace(b"Dist: torch", b"Dist: torch==1.0"), "its ops were built for torch 2.14"),
        ("WHEEL", b"Wheel-Version: 2.0\nTag: cp311-cp311-linux_x86_64\n", "WHEEL names the version '2.0'"),
        ("WHEEL", b"Wheel-Version: x.y\nTag: cp311-cp311-linux_x86_64\n", "WHEEL names the version 'x.y'"),
        ("WHEEL", b"Tag: cp311-cp311-linux_x86_64\n", "WHEEL names the version of no format"),
    ],
)
def test_what_pip_refuses_or_reads_in_its_own_way_is_named(
    name: str, content: bytes, told: str, library: bytes, tmp_path: Path
) -> None:
    facts = read_wheel(wheel(tmp_path, contents(library, **{f"{INFO}/{name}": content})))

    assert any(told in each for each in facts.contradictions), facts.contradictions


@pytest.mark.slow
def test_a_record_that_is_too_large_to_be_one_is_not_read(library: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="larger than any can be"):
        read_wheel(wheel(tmp_path, contents(library) | {f"{INFO}/RECORD": os.urandom(9 << 20).hex().encode()}))


@pytest.mark.parametrize("name", ["../../escaped", "/etc/escaped", "deepspeed/..\\..\\x"])
def test_a_wheel_that_reaches_outside_is_refused(name: str, library: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leads outside"):
        read_wheel(wheel(tmp_path, contents(library, **{name: b"x"})))


def test_a_wheel_that_one_installer_reads_as_another_is_refused(library: bytes, tmp_path: Path) -> None:
    """One that goes where the zip64 locator points would install evil.pth; one that does not sees a healthy wheel."""
    path = wheel(tmp_path, contents(library))
    (tmp_path / "other").mkdir()
    evil = wheel(tmp_path / "other", contents(library, **{"evil.pth": b"import os"}))
    assert read_wheel(path).foreign == ()
    path.write_bytes(two_faced(path.read_bytes(), evil.read_bytes()))

    with pytest.raises(UsageError, match="is refused: its zip64 locator does not point"):
        read_wheel(path)


@pytest.mark.parametrize(
    "name", ["deepspeed/GIT_version_info_installed.py", "deepspeed/./git_version_info_installed.py"]
)
def test_a_name_that_may_be_written_over_another_is_refused(name: str, library: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two entries with one name"):
        read_wheel(wheel(tmp_path, contents(library, **{name: b"x"})))


def test_a_link_in_a_wheel_is_refused(library: bytes, tmp_path: Path) -> None:
    path = wheel(tmp_path, contents(library))
    with zipfile.ZipFile(path, "a") as file:
        info = zipfile.ZipInfo("deepspeed/link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(info, "/etc/passwd")

    with pytest.raises(UsageError, match="holds a link"):
        read_wheel(path)


def test_a_bomb_is_refused_before_it_is_unpacked(library: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unpacks to"):
        read_wheel(wheel(tmp_path, contents(library, **{"deepspeed/zeros": bytes(10 << 20)})))


@pytest.mark.parametrize("keep", [0, 10, 400, -30])
def test_a_truncated_wheel_is_one_clear_error(keep: int, library: bytes, tmp_path: Path) -> None:
    path = wheel(tmp_path, contents(library))
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(UsageError, match="cannot be read as a wheel"):
        read_wheel(path)


def test_damage_inside_is_one_clear_error(library: bytes, tmp_path: Path) -> None:
    path = wheel(tmp_path, contents(library))
    data = bytearray(path.read_bytes())
    data[200:260] = b"\xff" * 60
    path.write_bytes(data)

    with pytest.raises(UsageError, match="cannot be read as a wheel"):
        read_wheel(path)


@pytest.mark.parametrize("name", ["numpy-2.0.0-cp311-cp311-linux_x86_64.whl", "deepspeed.whl", "x.tar.gz"])
def test_what_is_no_deepspeed_wheel_is_said(name: str, library: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="wheel"):
        read_wheel(wheel(tmp_path, contents(library), name))


def test_a_wheel_without_any_record_is_no_built_deepspeed(library: bytes, tmp_path: Path) -> None:
    files = contents(library)
    del files["deepspeed/git_version_info_installed.py"]

    with pytest.raises(UsageError, match="not a built DeepSpeed"):
        read_wheel(wheel(tmp_path, files))


def test_an_installed_deepspeed_is_read_like_its_wheel(library: bytes, tmp_path: Path) -> None:
    path = wheel(tmp_path, contents(library))
    with zipfile.ZipFile(path) as file:
        file.extractall(tmp_path / "site")
    location = tmp_path / "site" / "deepspeed"
    record = deepspeed_of_record(RECORD, version="?", location=str(location))
    (location / "git_version_info_installed.py").write_text(RECORD + "# edited")

    facts = read_installed(record)

    assert facts.present_ops == ("cpu_adam", "fused_adam")
    assert facts.altered == ("deepspeed/git_version_info_installed.py",)
    assert "-mavx2" in facts.cpu_flags


def test_an_installed_deepspeed_names_what_came_with_it_and_is_none_of_it(library: bytes, tmp_path: Path) -> None:
    path = wheel(tmp_path, contents(library, **{"evil.pth": b"import os", "sitecustomize.py": b""}))
    with zipfile.ZipFile(path) as file:
        file.extractall(tmp_path / "site")
    location = str(tmp_path / "site" / "deepspeed")
    record = deepspeed_of_record(RECORD, version="0.19.8+cu13.0.torch2.14", location=location)

    assert read_installed(record).foreign == ("evil.pth", "sitecustomize.py")
    (tmp_path / "site" / "evil.pth").unlink()
    assert read_installed(record).foreign == ("sitecustomize.py",)


def test_an_entry_point_that_torch_would_run_is_named_in_a_wheel_and_where_it_is_installed(
    library: bytes, tmp_path: Path
) -> None:
    evil = b"[torch.backends]\nx = deepspeed.evil:run\n"
    path = wheel(tmp_path, contents(library, **{f"{INFO}/entry_points.txt": evil}))
    with zipfile.ZipFile(path) as file:
        file.extractall(tmp_path / "site")
    installed = DeepSpeed(version="0.19.8+cu13.0.torch2.14", location=str(tmp_path / "site" / "deepspeed"))
    named = ("entry point [torch.backends] x = deepspeed.evil:run",)

    assert (read_wheel(path).foreign, read_installed(installed).foreign) == (named, named)
    # one that is not of the wheel whose name the package tells
    (tmp_path / "site" / INFO / "entry_points.txt").unlink()
    (tmp_path / "site" / "DeepSpeed-9.dist-info").mkdir()
    (tmp_path / "site" / "DeepSpeed-9.dist-info" / "entry_points.txt").write_bytes(evil)
    assert read_installed(installed).foreign == named


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (b"", ("METADATA names no package", "METADATA names no version")),
        (b"Name: torch\nVersion: 99\n", ("METADATA names the package 'torch'", "METADATA names the version '99'")),
        (METADATA.replace(b"\n\n", b"\nName: torch\n\n"), ("METADATA names the package 'torch'",)),
        (METADATA.replace(b"\n", b"\r\n") + b"\0", ("METADATA contains a NUL byte",)),
        (METADATA.replace(b"deepspeed", b"DeepSpeed").replace(b"0.19.8+", b"v0.19.8+") + b"Name: torch\n", ()),
    ],
)
def test_what_metadata_says_must_be_what_the_file_name_says(
    metadata: bytes, told: tuple[str, ...], tmp_path: Path
) -> None:
    path = wheel(tmp_path, contents(b"no library", **{f"{INFO}/METADATA": metadata}))

    assert read_wheel(path).contradictions == told


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("DEEPSPEED-0.19.8.dist-info/METADATA", "it has 2 .dist-info folders"),
        ("torch-2.14.DIST-INFO/METADATA", "it has 2 .dist-info folders"),
        ("deepspeed//evil.py", "'deepspeed//evil.py' is not in its plain form"),
        ("deepspeed/./evil.py", "'deepspeed/./evil.py' is not in its plain form"),
    ],
)
def test_a_name_that_installers_read_in_two_ways_is_named(name: str, told: str, tmp_path: Path) -> None:
    found = read_wheel(wheel(tmp_path, contents(b"no library", **{name: b"x"}))).contradictions

    assert any(told in each for each in found), found


def test_a_wheel_without_metadata_and_one_of_another_version_say_so(tmp_path: Path) -> None:
    files = contents(b"no library")
    moved = {name.replace("0.19.8", "0.19.7"): data for name, data in files.items()}
    del files[f"{INFO}/METADATA"]

    assert read_wheel(wheel(tmp_path, files)).contradictions == ("METADATA is missing",)
    assert read_wheel(wheel(tmp_path, moved)).contradictions == (
        f"the folder {INFO.replace('0.19.8', '0.19.7')!r} is of another version",
    )


def test_a_requirement_from_an_address_is_named_without_its_secrets(tmp_path: Path) -> None:
    lines = (
        b"\nRequires-Dist: torch @ https://me:secret@evil.example/x.whl?token=secret#sha256=1",
        b"\nrequires-dist: hjson[a, b]@\n  git+https://evil.example/r.git ; python_version > '3'",
        b"\nRequires-Dist: evil @ file:x.whl\nRequires-Dist: tensorboardX (==1.8) ; extra == 'a @ b'\n\n",
    )
    path = wheel(tmp_path, contents(b"no library", **{f"{INFO}/METADATA": METADATA.replace(b"\n\n", b"".join(lines))}))

    assert read_wheel(path).addresses == (
        "torch from https://evil.example/x.whl",
        "hjson from git+https://evil.example/r.git",
        "evil from ...",
    )
    assert read_wheel(wheel(tmp_path, contents(b"no library"))).addresses == ()


def test_a_requirement_that_no_release_has_is_a_doubt(tmp_path: Path) -> None:
    lines = (
        b"\nRequires-Dist: einops\nRequires-Dist: einops-evil\nRequires-Dist: Nvidia_ML.py>=12",
        b"\nRequires-Dist: sphinx ; extra == 'dev'\nRequires-Dist: trap ; extra == 'dev' or python_version > '3'",
        b"\nRequires-Dist: cupy-cuda12x ; python_version < '9' and extra == '1bit'\nRequires-Dist: other ; sys_platform == 'x'\n\n",
    )
    path = wheel(tmp_path, contents(b"no library", **{f"{INFO}/METADATA": METADATA.replace(b"\n\n", b"".join(lines))}))

    found = read_wheel(path)

    assert found.doubts == ("it requires einops-evil", "it requires trap", "it requires other")
    assert found.contradictions == ()
    assert read_wheel(wheel(tmp_path, contents(b"no library"))).doubts == ()


def test_more_requirements_than_anybody_has_are_not_all_read(tmp_path: Path) -> None:
    many = b"".join(b"\nRequires-Dist: p%d" % number for number in range(30_000))
    path = wheel(tmp_path, contents(b"no library", **{f"{INFO}/METADATA": METADATA.replace(b"\n\n", many + b"\n\n")}))

    found = read_wheel(path)

    assert found.contradictions == ("METADATA holds 30,001 requirements, more than any DeepSpeed",)
    assert len(found.doubts) < 1_001


@pytest.mark.parametrize("manifest", [b"[" * 200_000, b'{"a":' + b"9" * 5_000 + b"}", b"", b'{"schema": "x"}', b"{}"])
def test_a_manifest_that_cannot_be_read_is_a_doubt(manifest: bytes, tmp_path: Path) -> None:
    found = read_wheel(wheel(tmp_path, contents(b"no library", **{f"{INFO}/dsdoctor.json": manifest})))

    assert found.doubts == ("its manifest dsdoctor.json cannot be read",)


def test_the_manifest_outweighs_the_record() -> None:
    manifest = {
        "schema": "dsdoctor-manifest/1",
        "version": "1",
        "accelerator": "cuda",
        "torch": "2.14.1+cu130",
        "nvidia": {"cuda_version_lower_bound": "13.0"},
        "cpu_flags": ["-mavx2"],
        "ops": [
            {"op": "fused_adam", "sm_arch": ["90_real"]},
            {"op": "async_io", "needed": ["libaio.so.1", "libgomp.so.1", "libc.so.6"], "run_path": ["/conda/lib"]},
        ],
    }
    facts = with_manifest(
        DeepSpeed(version="1", location="."), json.dumps(manifest), exists={"/conda/lib/libgomp.so.1"}.__contains__
    )

    assert (facts.torch, facts.cuda, facts.told_by) == ("2.14", "13.0", "manifest")
    assert facts.sm_arch == {"fused_adam": ("90_real",)}
    assert facts.needed == {"async_io": ("libaio.so.1",)}


@pytest.mark.slow
def test_what_an_op_links_is_left_to_the_system_unless_its_own_folders_have_it(tmp_path: Path) -> None:
    (tmp_path / "x.c").write_text("int f(void) { return 1; }")
    for soname in ("libaio.so.1", "libgomp.so.1"):
        argv = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", soname, "x.c"]
        subprocess.run(argv, cwd=tmp_path, check=True)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "libgomp.so.1").touch()
    linked = ["-Wl,--no-as-needed", "libaio.so.1", "libgomp.so.1", f"-Wl,-rpath,relative:{tmp_path}/own"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "x.so", "x.c", *linked], cwd=tmp_path, check=True)

    facts = read_wheel(wheel(tmp_path, contents((tmp_path / "x.so").read_bytes())))

    assert facts.needed == {"cpu_adam": ("libaio.so.1",), "fused_adam": ("libaio.so.1",)}


def test_a_wheel_is_whole_with_what_was_written_into_it(library: bytes, tmp_path: Path) -> None:
    path = wheel(tmp_path, contents(library, **{f"{INFO}/sboms/a.cdx.json": b"{}", f"{INFO}/dsdoctor.json": b"old"}))
    plan = BuildPlan(**dict.fromkeys(BuildPlan.__dataclass_fields__, ()))
    plan = replace(plan, python="", toolkit=None)
    manifest = Manifest(**{**dict.fromkeys(Manifest.__dataclass_fields__, ""), "plan": plan})
    (tmp_path / "out").mkdir()

    made = write_into(path, manifest, tmp_path / "out", {"sboms/a.cdx.json": b"{}\n"}, epoch=EARLIEST)

    assert read_wheel(made).altered == ()
    with zipfile.ZipFile(made) as file:
        assert file.read(f"{INFO}/sboms/a.cdx.json") == b"{}\n"
        assert len(file.namelist()) == len(set(file.namelist()))


@given(st.text(max_size=400), st.text(max_size=200))
@pytest.mark.slow
def test_any_text_is_a_record_and_a_manifest_of_something(text: str, other: str) -> None:
    facts = deepspeed_of_record(text, version="v", location=".")

    assert isinstance(with_tags(with_manifest(facts, other, exists=bool), text), DeepSpeed)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_any_damage_to_a_wheel_is_our_error_or_none(data: st.DataObject, library: bytes, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in contents(library[:5000]).items():
            file.writestr(name, content)
    broken = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 6))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / NAME
    path.write_bytes(broken)

    try:
        assert isinstance(read_wheel(path), DeepSpeed)
    except UsageError as error:
        assert error.message
