"""A tensor whose storage is too small or too large for it: torch refuses it, and so is it said."""

import io
import re
import zipfile
from pathlib import Path

import pytest

from dsdoctor.checkpoint.torch_file import read_archive

torch = pytest.importorskip("torch")


def saved(path: Path, tensor: "torch.Tensor", pattern: bytes, changed: bytes) -> Path:
    """What torch.save writes of a tensor, with a part of its pickle changed."""
    plain = io.BytesIO()
    torch.save(tensor, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith("/data.pkl"):
                content, count = re.subn(pattern, lambda _: changed, content, count=1, flags=re.DOTALL)
                assert count == 1
            new.writestr(entry.filename, content)
    return path


@pytest.mark.parametrize(
    ("tensor", "pattern", "changed"),
    [
        (torch.ones(4), rb"K\x04\x85", b"K\x09\x85"),  # the shape
        (torch.ones(2, 2), rb"K\x02K\x01\x86", b"K\x07K\x01\x86"),  # the stride
        (torch.ones(8)[2:5], rb"QK\x02", b"QK\x06"),  # the start
    ],
)
def test_a_tensor_that_reaches_beyond_its_storage_is_a_damage(
    tensor: "torch.Tensor", pattern: bytes, changed: bytes, tmp_path: Path
) -> None:
    whole = read_archive(saved(tmp_path / "whole.pt", tensor, b"$", b""), {})
    broken = saved(tmp_path / "broken.pt", tensor, pattern, changed)

    assert (whole.problem, whole.unknown) == ("", "")
    assert "reaches beyond its values" in read_archive(broken, {}).problem
    with pytest.raises(RuntimeError):
        torch.load(broken)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_storage_of_another_size_than_its_record_is_a_damage(count: int, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.pt", tmp_path / "broken.pt"
    torch.save(torch.ones(count, dtype=torch.uint8), whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(broken, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry) + b"xx" * entry.filename.endswith("/data/0"))

    assert read_archive(whole, {}).problem == ""
    assert read_archive(broken, {}).problem == f"data/0 has {count + 2} bytes, but its tensor has {count}"
    with pytest.raises(RuntimeError):
        torch.load(broken)
