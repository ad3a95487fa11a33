"""Archives made here, healthy and malicious, unpacked for real."""

import io
import stat
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from dsdoctor.builder.source.fetch import MAX_UNPACKED_BYTES, unpack
from dsdoctor.core.errors import UsageError

Member = tuple[str, bytes, str]
"""The name, the kind, and the content or the target of a link."""


def tar(path: Path, members: Iterable[Member]) -> Path:
    """A .tar.gz that claims to be another user's, with special modes."""
    with tarfile.open(path, "w:gz") as file:
        for name, kind, text in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o6777
            info.uid, info.uname = 4711, "nobody"
            if kind == tarfile.REGTYPE:
                info.size = len(text)
                file.addfile(info, io.BytesIO(text.encode()))
            else:
                info.linkname = text
                file.addfile(info)
    return path


def regular(name: str, text: str = "x") -> Member:
    return name, tarfile.REGTYPE, text


def link(name: str, target: str) -> Member:
    return name, tarfile.SYMTYPE, target


def test_links_that_stay_inside_are_kept_and_no_owner_or_special_mode_is(tmp_path: Path) -> None:
    members = (
        link("./top/deepspeed/ops/csrc", "../../csrc"),
        regular("./top/csrc/adam.cpp", "int x;"),
        ("./top/hard", tarfile.LNKTYPE, "top/csrc/adam.cpp"),
        link("./top/again", "deepspeed/ops/csrc"),
    )

    unpack(tar(tmp_path / "x.tar.gz", members), tmp_path / "tree")

    inside = tmp_path / "tree" / "deepspeed" / "ops" / "csrc" / "adam.cpp"
    assert (tmp_path / "tree" / "hard").read_text() == inside.read_text() == "int x;"
    assert (tmp_path / "tree" / "again" / "adam.cpp").is_file()
    assert (inside.stat().st_mode & 0o7777, inside.stat().st_uid) == (0o755, tmp_path.stat().st_uid)


OUTSIDE: dict[str, tuple[Member, ...]] = {
    "dots": (regular("../../escaped"),),
    "absolute": (regular("/tmp/escaped"),),
    "link-out": (link("top/link", "../../../etc"),),
    "link-absolute": (link("top/link", "/etc"),),
    "link-at-the-top": (link("top", "."),),
    # lexically top/out is top's own folder; through top/deep it lies three folders above
    "chained": (
        regular("top/a/b/c/file"),
        link("top/deep", "a/b/c"),
        link("top/out", "deep/../../../../.."),
        regular("top/out/escaped"),
    ),
    "chained-links-alone": (link("top/a", "."), link("top/b", "a/../.."), regular("top/file")),
    "behind-a-link": (link("top/here", "."), regular("top/here/escaped")),
    "behind-a-later-link": (regular("top/here/escaped"), link("top/here", ".")),
    "hard-out": (("top/hard", tarfile.LNKTYPE, "../../escaped"),),
    "hard-to-a-link": (link("top/a", "b"), ("top/hard", tarfile.LNKTYPE, "top/a")),
    "device": (("top/null", tarfile.CHRTYPE, ""),),
    "pipe": (("top/pipe", tarfile.FIFOTYPE, ""),),
}


@pytest.mark.parametrize("how", OUTSIDE)
def test_a_tar_that_reaches_outside_is_refused(how: str, tmp_path: Path) -> None:
    archive = tar(tmp_path / "evil.tar.gz", OUTSIDE[how])
    folder = tmp_path / "a" / "b" / "tree"

    with pytest.raises(UsageError, match="reaches outside of it or is not a file"):
        unpack(archive, folder)
    assert list(folder.parent.iterdir()) == []
    assert not list(tmp_path.rglob("escaped"))


def test_a_zip_that_reaches_outside_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "evil.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../../escaped", "x")

    with pytest.raises(UsageError, match="leads outside"):
        unpack(archive, tmp_path / "a" / "b" / "tree")
    assert not list(tmp_path.rglob("escaped"))


def test_an_archive_that_claims_to_be_larger_than_a_source_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    info = tarfile.TarInfo("top/zeros")
    info.size = MAX_UNPACKED_BYTES + 1
    huge_tar, huge_zip = tmp_path / "huge.tar", tmp_path / "huge.zip"
    huge_tar.write_bytes(info.tobuf() + bytes(1024))
    with zipfile.ZipFile(huge_zip, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("top/zeros", b"")
    data = bytearray(huge_zip.read_bytes())
    for header, size in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        struct.pack_into("<I", data, data.index(header) + size, MAX_UNPACKED_BYTES + 1)
    huge_zip.write_bytes(data)

    for archive in (huge_tar, huge_zip):
        with pytest.raises(UsageError, match="more than a DeepSpeed source can be"):
            unpack(archive, tmp_path / "tree")
        assert {path.name for path in tmp_path.iterdir()} == {"huge.tar", "huge.zip"}


def test_a_zip_with_a_password_is_no_readable_sdist(tmp_path: Path) -> None:
    archive = tmp_path / "locked.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("top/setup.py", "x")
    data = bytearray(archive.read_bytes())
    for header, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(header) + flags] |= 1
    archive.write_bytes(data)

    with pytest.raises(UsageError, match=r"not a readable sdist: .*encrypted"):
        unpack(archive, tmp_path / "tree")


def two_names(archive: Path) -> None:
    """Two installers take two files for one."""
    with zipfile.ZipFile(archive, "a") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file.writestr("top/setup.py", "evil")


def a_second_zip_behind(archive: Path) -> None:
    """A reader that looks at the end sees the second one, as Python's zipfile does."""
    other = archive.with_name("other")
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("evil/setup.py", "evil")
    archive.write_bytes(archive.read_bytes() + other.read_bytes())
    other.unlink()


def a_link(archive: Path) -> None:
    with zipfile.ZipFile(archive, "a") as file:
        info = zipfile.ZipInfo("top/link")
        info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        file.writestr(info, "/etc/passwd")


@pytest.mark.parametrize("harm", [two_names, a_second_zip_behind, a_link])
def test_a_zip_that_two_readers_could_take_for_two_is_no_sdist(harm: Callable[[Path], None], tmp_path: Path) -> None:
    archive = tmp_path / "x.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("top/", "")
        file.writestr("top/setup.py", "x" * 1000)
    unpack(archive, tmp_path / "good")
    harm(archive)

    with pytest.raises(UsageError):
        unpack(archive, tmp_path / "tree")
    assert (tmp_path / "good" / "setup.py").read_text() == "x" * 1000
    assert not (tmp_path / "tree").exists()


def test_a_tar_with_a_zip_behind_it_is_a_tar(tmp_path: Path) -> None:
    archive = tar(tmp_path / "x.tar.gz", [("top/setup.py", tarfile.REGTYPE, "x")])
    a_second_zip_behind(archive)
    assert zipfile.is_zipfile(archive)

    unpack(archive, tmp_path / "tree")
    assert (tmp_path / "tree" / "setup.py").read_text() == "x"
