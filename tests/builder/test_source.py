import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from dsdoctor.builder.source.fetch import constraint_limit, digest, lay_out, sha256_of, spell_source
from dsdoctor.core.errors import BuildFailed, UsageError
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import DeepSpeed


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree that looks like DeepSpeed's, with what earlier builds leave behind."""
    root = tmp_path / "DeepSpeed"
    for name, text in {
        "setup.py": "print('hello')",
        "version.txt": "0.19.8\n",
        "op_builder/all_ops.py": "",
        "csrc/adam.cpp": "int x;",
        "build/temp/old.o": "old",
        "deepspeed/ops/old_op.cpython-311-x86_64-linux-gnu.so": "old",
        "deepspeed/git_version_info_installed.py": "version='foo'",
        ".git/HEAD": "ref: refs/heads/master",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "deepspeed" / "ops" / "csrc").symlink_to("../../csrc")
    return root


def laid_out(spec: str, tmp_path: Path, *, offline: bool = True) -> Path:
    folder = tmp_path / "work" / "source"
    lay_out(LocalHost(), spec, folder, cache=tmp_path / "cache", python="/no/python", offline=offline)
    return folder


def test_a_folder_is_copied_without_what_earlier_builds_left(tree: Path, tmp_path: Path) -> None:
    before = digest(tree)

    folder = laid_out(str(tree), tmp_path)

    assert digest(tree) == before
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() or path.is_symlink()}
    assert names == {
        "setup.py",
        "version.txt",
        "op_builder/all_ops.py",
        "csrc/adam.cpp",
        "deepspeed/ops/csrc",
    }


def test_the_digest_sees_names_contents_and_modes(tree: Path) -> None:
    first = digest(tree)
    (tree / "csrc" / "adam.cpp").write_text("int y;")
    second = digest(tree)
    (tree / "setup.py").chmod(0o755)

    assert len({first, second, digest(tree)}) == 3


def test_an_sdist_is_unpacked(tree: Path, tmp_path: Path) -> None:
    archive = tmp_path / "deepspeed-0.19.8.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tree, arcname="deepspeed-0.19.8")

    assert (laid_out(str(archive), tmp_path) / "setup.py").read_text() == "print('hello')"


@pytest.mark.slow
def test_a_git_url_is_fetched_at_its_branch(tree: Path, tmp_path: Path) -> None:
    shutil.rmtree(tree / ".git")
    git = ["git", "-C", str(tree), "-c", "user.name=t", "-c", "user.email=t@t.invalid"]
    subprocess.run([*git, "init", "-q", "-b", "fix"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)

    folder = laid_out(f"git+file://{tree}@fix", tmp_path)

    assert (folder / "deepspeed" / "ops" / "csrc").is_symlink()
    with pytest.raises(BuildFailed, match="git could not fetch") as caught:
        laid_out(f"git+file://me:token@localhost{tree}@no-such-branch", tmp_path / "again")
    assert "token" not in caught.value.message


def test_a_folder_that_is_no_deepspeed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"it has no setup\.py"):
        laid_out(str(tmp_path), tmp_path / "x")


@pytest.mark.parametrize("spec", ["no-such-thing", "1.2; rm -rf /", "../no-such-folder"])
def test_a_word_that_is_no_source(spec: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder, a file, a version"):
        laid_out(spec, tmp_path)


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"\x1f\x8b\x08\x00broken"])
def test_a_corrupted_sdist(content: bytes, tmp_path: Path) -> None:
    archive = tmp_path / "deepspeed-0.19.8.tar.gz"
    archive.write_bytes(content)

    with pytest.raises(UsageError, match="not a readable sdist"):
        laid_out(str(archive), tmp_path)
    assert not list((tmp_path / "work").glob(".*"))


def test_a_truncated_sdist(tree: Path, tmp_path: Path) -> None:
    archive = tmp_path / "deepspeed-0.19.8.tar.gz"
    (tree / "csrc" / "big").write_bytes(bytes(range(256)) * 4096)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tree, arcname="deepspeed-0.19.8")
    archive.write_bytes(archive.read_bytes()[:2000])

    with pytest.raises(UsageError, match="sdist"):
        laid_out(str(archive), tmp_path)


def test_offline_without_a_cached_sdist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--offline forbids"):
        laid_out("0.19.8", tmp_path)


def test_the_installed_version_is_built_else_the_newest() -> None:
    installed = DeepSpeed(version="0.18.0+cu12.8.torch2.9", location="/x")
    odd = DeepSpeed(version="0.19.9+abc.dirty", location="/x")

    assert spell_source(None, installed)[0] == "0.18.0"
    assert spell_source(None, None)[0] == "newest"
    assert spell_source("0.17.1", installed)[0] == "0.17.1"
    assert spell_source(None, odd)[0] == "0.19.9"


def test_the_newest_offline_is_that_of_the_highest_version_and_says_so(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "cache" / "sdists").mkdir(parents=True)
    (tmp_path / "cache").chmod(0o700)
    # the older release is fetched last
    for version in ("0.19.8", "0.9.5"):
        (tree / "version.txt").write_text(f"{version}\n")
        sdist = tmp_path / "cache" / "sdists" / f"deepspeed-{version}.tar.gz"
        with tarfile.open(sdist, "w:gz") as archive:
            archive.add(tree, arcname=f"deepspeed-{version}")
        sdist.with_name(f"{sdist.name}.json").write_text(json.dumps({"sha256": sha256_of(sdist)}))

    laid = lay_out(LocalHost(), "newest", tmp_path / "laid", cache=tmp_path / "cache", python="/no", offline=True)

    assert (laid.folder / "version.txt").read_text().strip() == "0.19.8"
    assert laid.limit == "the newest of 2 in the cache; offline, so no index was queried"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("deepspeed<0.19  # an old node", "deepspeed<0.19"),
        ("DeepSpeed ==0.18.* ; python_version >= '3.8'", "deepspeed==0.18.*"),
        ("deepspeed==0.1 ; python_version < '3'", ""),
        ("deepspeed-kernels==1.0\n-e .\ntorch==2.13.0", ""),
    ],
)
def test_a_constraint_that_limits_the_newest_is_named(line: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "the pins.txt"
    file.write_text(line)
    host = LocalHost(env={"PIP_CONSTRAINT": f"/none.txt '{file}'"})

    limit = constraint_limit(host)

    assert limit == (f"the newest that {file} (PIP_CONSTRAINT) allows: {says}" if says else "")


@pytest.mark.parametrize(
    "source",
    [
        "git+--upload-pack=touch P;",
        "git+--upload-pack=touch P;@main",
        "git+https://host/x@--upload-pack=touch P",
        "git+ext::sh -c 'touch P'",
        "git+ssh://-oProxyCommand=touch P/x",
        "git+-oProxyCommand=touch P:x",
    ],
)
def test_no_source_becomes_an_option_of_git(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises((UsageError, BuildFailed)):
        lay_out(LocalHost(), source, tmp_path / "laid", cache=tmp_path / "cache", python="/no", offline=False)
    assert not list(tmp_path.rglob("P"))
