"""A DeepSpeed source: a folder, an sdist, a version or a git URL -> a temporary tree, ready to be described and built.

A folder is copied and never written to, an sdist is unpacked, a version is fetched by pip and a git URL by git. Sdists are kept in
the cache, each with the sha256 that the package index gave; one that differs is not used. An sdist's members are written here and
not by ``tarfile.extractall``: Debian 12's Python 3.11.2 has no filters, and the filters of later releases were passed by links that
lead through other links. Nothing is written outside of the tree, through a link, or without end.
"""

import errno
import hashlib
import lzma
import os
import re
import shlex
import shutil
import stat
import tarfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from shlex import quote

import msgspec
from filelock import FileLock
from packaging.requirements import Requirement
from packaging.version import Version

from dsdoctor.core.errors import BuildFailed, DoctorError, ImpossiblePlan, UsageError, is_full
from dsdoctor.core.files import open_new, open_regular, read_limited, real_path, sha256_of, write_bytes
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import DeepSpeed
from dsdoctor.core.pip import OTHER_HASH, failed_fetch, run_pip, why_failed
from dsdoctor.core.redaction import urls
from dsdoctor.core.text import decode, encode
from dsdoctor.core.workspace import private_folder
from dsdoctor.core.zip_file import BadZip, read_bytes, read_entries
from dsdoctor.rules import book


def newest_sdist(sdists: Sequence[Path]) -> Path:
    """The one of the highest version; a pre-release only where there is no other. ``sdists`` holds at least one.

    >>> newest_sdist([Path("deepspeed-0.9.5.tar.gz"), Path("deepspeed-0.19.8.tar.gz"), Path("deepspeed-0.20.0rc1.tar.gz")]).name
    'deepspeed-0.19.8.tar.gz'
    """
    return max(sdists, key=lambda path: (not _version(path).is_prerelease, _version(path)))


def offline_limit(sdists: Sequence[Path]) -> str:
    """What --offline keeps from being known."""
    return book.phrase("builder", "newest-in-cache", count=len(sdists))


def constraint_limit(host: LocalHost) -> str:
    """The constraint of DeepSpeed in the files that PIP_CONSTRAINT names, as a reason; "" where there is none."""
    for name in _index_files(host.variable("PIP_CONSTRAINT") or ""):
        for line in (host.read(name) or "").splitlines():
            specifier = _of_deepspeed(line)
            if specifier:
                return book.phrase("builder", "newest-allowed", file=name, specifier=specifier)
    return ""


def _index_files(variable: str) -> list[str]:
    """pip takes several, with blanks between them."""
    try:
        return shlex.split(variable)
    except ValueError:
        return [variable]


def _of_deepspeed(line: str) -> str:
    """The versions that a line of a constraints file allows DeepSpeed; "" for a line about something else.

    >>> _of_deepspeed("deepspeed == 0.19.8 ; python_version >= '3.10'  # why"), _of_deepspeed("deepspeed-kernels==1.0")
    ('==0.19.8', '')
    """
    try:
        wanted = Requirement(re.sub(r"(^|\s)#.*$", "", line).strip())
    except ValueError:
        return ""
    holds = wanted.marker is None or wanted.marker.evaluate()
    return str(wanted.specifier) if wanted.name.lower() == "deepspeed" and holds else ""


def _version(path: Path) -> Version:
    try:
        return Version(path.name.removeprefix("deepspeed-").removesuffix(".tar.gz"))
    except ValueError:
        return Version("0")


NEWEST = "newest"
ONLY_SOURCES = ("--quiet", "--no-deps", "--no-binary", ":all:", "--disable-pip-version-check")
HINT = "check the network and the version, or name a folder or a file with --source"


@dataclass(frozen=True, kw_only=True)
class FetchedSdist:
    """What is recorded beside a kept sdist. ``url`` is where the index has it; "" where pip is too old to tell."""

    sha256: str
    url: str = ""


def fetch_sdist(host: LocalHost, version: str, *, cache: Path, python: str, offline: bool) -> Path:
    """An sdist in the cache, fetched by pip when it is not there yet.

    Raises ImpossiblePlan for one that has changed since, BuildFailed for one that is not what the index says.
    """
    folder = private_folder(cache / "sdists", "*")
    kept = sorted(folder.glob(f"deepspeed-{version}.tar.gz" if version != NEWEST else "deepspeed-*.tar.gz"))
    if kept and (offline or version != NEWEST):
        sdist = newest_sdist(kept)
        if _is_recorded(sdist):
            return sdist
        if offline:
            raise UsageError(
                f"{sdist} is not used: its digest was not recorded, and --offline forbids downloading it",
                hint=f"run it once without --offline, or trust the file: --source {quote(str(sdist))}",
            )
    if offline:
        raise UsageError(
            f"the sdist of DeepSpeed ({version}) is not in {folder}, and --offline forbids downloading it",
            hint="run it once without --offline, or name a folder or a file with --source",
        )
    with FileLock(folder / ".lock", mode=0o600):
        return _download(host, version, folder, python)


def without_steering(environment: dict[str, str]) -> dict[str, str]:
    """An environment without the variables that change what DeepSpeed builds."""
    steering = ("DS_", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST")
    return {name: value for name, value in environment.items() if not name.startswith(steering)}


def _record_of(sdist: Path) -> Path:
    return sdist.with_name(f"{sdist.name}.json")


def _is_recorded(sdist: Path) -> bool:
    """Whether an sdist is what was fetched; False where nothing is recorded. Raises ImpossiblePlan where it is another."""
    try:
        recorded = decode(read_limited(_record_of(sdist), 1 << 16), FetchedSdist).sha256
    except (OSError, msgspec.DecodeError):
        return False
    now = sha256_of(sdist)
    if now == recorded:
        return True
    raise ImpossiblePlan(
        f"{sdist} is not used: its sha256 is {now}, and {recorded} was recorded when it was fetched",
        hint=f"rm {quote(str(sdist))}; rerun to download it again",
    )


def _download(host: LocalHost, version: str, folder: Path, python: str) -> Path:
    temporary = folder / f".{os.getpid()}.tmp"
    requirement = "deepspeed" if version == NEWEST else f"deepspeed=={version}"
    # pip runs the sdist's setup.py for its metadata: without the caller's DS_*, which would make it compile
    child = LocalHost(env=without_steering(host.environment()) | {"DS_BUILD_OPS": "0"})
    what = f"the sdist of {requirement}"
    try:
        run_pip(child, python, ["download", *ONLY_SOURCES, "--dest", str(temporary), requirement], what=what, hint=HINT)
        found = sorted(temporary.glob("deepspeed-*.tar.gz"))
        if not found:
            raise BuildFailed(f"pip fetched {requirement}, which is not a .tar.gz", hint="name a file with --source")
        listed = _ask_index(child, python, found[0], temporary / "report.json")
        # the record first: an sdist without one is fetched again
        write_bytes(_record_of(folder / found[0].name), encode(listed))
        return found[0].replace(folder / found[0].name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _ask_index(child: LocalHost, python: str, sdist: Path, report: Path) -> FetchedSdist:
    """What the package index says of a fetched sdist. Raises BuildFailed where that is another file.

    A pip older than 22.2 cannot tell it; that one compares the digest by itself where the index gives one.
    """
    fetched = sha256_of(sdist)
    version = sdist.name.removeprefix("deepspeed-").removesuffix(".tar.gz")
    question = [
        "install",
        "--dry-run",
        "--ignore-installed",
        *ONLY_SOURCES,
        "--report",
        str(report),
        f"deepspeed=={version}",
    ]
    try:
        run_pip(child, python, question, what=f"the digest of {sdist.name}", hint=HINT)
        listed = _parse_report(read_limited(report))
    except (BuildFailed, OSError):
        listed = None
    if listed is None:
        return FetchedSdist(sha256=fetched)
    if listed.sha256 != fetched:
        raise BuildFailed(
            f"{sdist.name} came with sha256 {fetched}, and the package index says {listed.sha256}: it is not used",
            hint=f"it is at {listed.url}; {OTHER_HASH}",
        )
    return listed


def _parse_report(text: bytes) -> FetchedSdist | None:
    """The digest in what ``pip install --report`` writes; None where there is none.

    >>> _parse_report(b'{"install":[{"download_info":{"url":"https://h/d.tar.gz","archive_info":{"hashes":{"sha256":"ab"}}}}]}')
    FetchedSdist(sha256='ab', url='https://h/d.tar.gz')
    """

    class Archive(msgspec.Struct):
        hashes: dict[str, str] = {}

    class Download(msgspec.Struct):
        url: str = ""
        archive_info: Archive = msgspec.field(default_factory=Archive)

    class Item(msgspec.Struct):
        download_info: Download

    class Report(msgspec.Struct):
        install: tuple[Item, ...] = ()

    try:
        (item,) = decode(text, Report).install
    except (msgspec.DecodeError, ValueError):
        return None
    digest = item.download_info.archive_info.hashes.get("sha256", "")
    url = re.sub(r"://[^/@\s]+@", "://", item.download_info.url)
    return FetchedSdist(sha256=digest, url=url) if digest else None


MAX_UNPACKED_BYTES = 2 << 30
MAX_FILES = 200_000
"""DeepSpeed's sdist has 1,100 files and 10 MB, its whole repository 100 MB."""

DAMAGE = (
    *(tarfile.TarError, BadZip, zlib.error, lzma.LZMAError),
    *(EOFError, OSError, ValueError, OverflowError, RuntimeError, NotImplementedError, KeyError),
)
"""What a damaged archive raises where it is read."""

SOURCES = "a DeepSpeed source can be"
Parts = tuple[str, ...]


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an sdist's single top folder as ``folder``. Raises UsageError for what is not an sdist, or would write outside."""
    staging = folder.with_name(f".{folder.name}.unpack")
    staging.mkdir(parents=True)
    try:
        if _is_zip(archive):
            _unzip(archive, staging)
        else:
            _untar(archive, staging, SOURCES)
        tops = [path for path in staging.iterdir() if path.is_dir()]
        if len(tops) != 1:
            raise UsageError(f"{archive} is not an sdist: it holds {len(tops)} top folders, an sdist holds one")
        tops[0].replace(folder)
    except DoctorError:
        raise
    except DAMAGE as error:
        if is_full(error):
            raise
        raise UsageError(
            f"{archive} is not a readable sdist: {error}",
            hint="fetch it again: python -m pip download --no-deps deepspeed",
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def untar(archive: Path, folder: Path, *, largest: int, most: str) -> None:
    """Unpack any .tar.gz or .tar.xz into an existing folder. ``largest``: the bytes that it may unpack to; ``most``: who has so
    much at most, for the message.

    Raises UsageError for a damaged archive, one that would write outside, and one without end.
    """
    try:
        _untar(archive, folder, most, largest)
    except DoctorError:
        raise
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise UsageError(f"{archive} is not a readable archive: {error}", hint="fetch it again") from None


def _is_zip(archive: Path) -> bool:
    """By its first bytes: behind a .tar.gz a zip's end record may stand, which some readers would go by."""
    with open_regular(archive) as file:
        return file.read(2) == b"PK"


def _unzip(archive: Path, staging: Path) -> None:
    with open_regular(archive) as file:
        entries = read_entries(file)
        _refuse_too_large(archive, len(entries), sum(entry.size for entry in entries), SOURCES)
        for entry in entries:
            if stat.S_IFMT(entry.mode) not in {0, stat.S_IFREG, stat.S_IFDIR}:
                raise UsageError(f"{archive} holds {entry.name!r}, which is not a file")
        for entry in entries:
            place = staging / entry.name
            (place if entry.is_folder else place.parent).mkdir(parents=True, exist_ok=True)
            if not entry.is_folder:
                with open_new(place) as made:
                    made.writelines(read_bytes(file, entry))


def _untar(archive: Path, staging: Path, most: str, largest: int = MAX_UNPACKED_BYTES) -> None:
    with tarfile.open(archive) as tar:
        members = list(_within_limits(tar, archive, most, largest))
        links = {_parts(member) for member in members if member.issym()}
        for member in members:
            if not _stays_inside(member, links):
                raise UsageError(f"{archive} holds {member.name!r}, which reaches outside of it or is not a file")
        for member in members:
            _write(tar, member, staging)


def _within_limits(tar: tarfile.TarFile, archive: Path, most: str, largest: int) -> Iterator[tarfile.TarInfo]:
    """The members; the first that is too much ends it, before its bytes are unpacked."""
    total = 0
    for count, member in enumerate(tar, 1):
        total += max(0, member.size)
        _refuse_too_large(archive, count, total, most, largest)
        yield member


def _refuse_too_large(archive: Path, count: int, total: int, most: str, largest: int = MAX_UNPACKED_BYTES) -> None:
    if count > MAX_FILES or total > largest:
        raise UsageError(
            f"{archive} unpacks to at least {count:,} files of {total:,} bytes, more than {most}",
            hint="name an sdist of DeepSpeed, or a folder" if most == SOURCES else "fetch it again",
        )


def _parts(member: tarfile.TarInfo) -> Parts:
    return PurePosixPath(member.name).parts


def _stays_inside(member: tarfile.TarInfo, links: Collection[Parts]) -> bool:
    """Whether a member is a file, a folder or a link that stays inside, and does not lie behind a link."""
    parts = _parts(member)
    if member.name.startswith("/") or ".." in parts or any(parts[:depth] in links for depth in range(1, len(parts))):
        return False
    if member.issym():
        return len(parts) > 1 and leads_inside(parts[:-1], member.linkname, links)
    if member.islnk():
        target = PurePosixPath(member.linkname).parts
        return leads_inside((), member.linkname, links) and ".." not in target and target not in links
    return member.isfile() or member.isdir()


def leads_inside(folder: Parts, target: str, links: Collection[Parts]) -> bool:
    """Whether a link's target stays below the top folder, and is not reached through another link.

    >>> leads_inside(("top", "a"), "../b", ())
    True
    >>> leads_inside(("top", "a"), "../../b", ()), leads_inside(("top",), "a/../x", {("top", "a")})
    (False, False)
    """
    if target.startswith("/"):
        return False
    place = list(folder)
    for part in PurePosixPath(target).parts:
        if tuple(place) in links:
            return False
        if part != "..":
            place.append(part)
        elif place:
            place.pop()
        if not place:
            return False
    return True


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, staging: Path) -> None:
    """One checked member. Owner and special modes are not taken over; times are, which decide what a build makes anew."""
    target = staging / member.name
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if member.issym():
        target.symlink_to(member.linkname)
        return
    if member.islnk():
        # not a copy: many links to one large file would be more than the limit allows
        target.hardlink_to(staging / member.linkname)
        return
    source = tar.extractfile(member)
    if source is None:
        raise ValueError(f"{member.name!r} has no content")
    with source, target.open("xb") as file:
        shutil.copyfileobj(source, file)
    target.chmod(0o755 if member.mode & 0o100 else 0o644)
    os.utime(target, (member.mtime, member.mtime))


FETCH_TIMEOUT_SECONDS = 1800.0
GIT_ADDRESS = re.compile(r"(?:https?|ssh|git|file)://[^-\s]|[A-Za-z0-9_.][\w.-]*@[A-Za-z0-9_.][\w.-]*:")
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", "build", "dist", "*.egg-info", "__pycache__", "*.pyc", "*.cpython-*.so", "git_version_info_installed.py"
)
"""What an earlier build leaves in a tree, and must not get into this build."""


def spell_source(request: str | None, installed: DeepSpeed | None) -> tuple[str, str]:
    """What to build and why: what --source names, else the installed DeepSpeed's version, else the newest release."""
    if request:
        return request, "--source"
    if installed is not None:
        public = installed.version.split("+")[0]
        if re.fullmatch(r"\d+(\.\d+)+(rc\d+|\.post\d+)?", public):
            return public, book.phrase("builder", "version-installed", version=installed.version)
    return NEWEST, book.phrase("builder", "newest-release")


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """A tree in its temporary folder. ``asked`` is what was asked for, without any password; ``commit`` is None where unknown.

    ``limit``: what may have kept a newer release than this one from being taken, where the newest was asked for.
    """

    folder: Path
    asked: str
    commit: str | None
    because: str = ""
    limit: str = ""


def lay_out(host: LocalHost, spec: str, folder: Path, *, cache: Path, python: str, offline: bool) -> LaidOut:
    """Put the tree of ``spec`` into ``folder`` (which must not exist).

    Raises UsageError for what is not a DeepSpeed source, BuildFailed for a fetch that fails.
    """
    place = Path(os.path.expanduser(spec))  # noqa: PTH111 - Path.expanduser raises for an unknown user
    commit = None
    if spec.startswith("git+"):
        commit = _clone(host, spec.removeprefix("git+"), folder, offline=offline)
    elif place.is_dir():
        commit = _commit(host, place)
        shutil.copytree(place, folder, symlinks=True, ignore=LEFT_BEHIND)
    elif place.is_file():
        unpack(place, folder)
    elif spec == NEWEST or re.fullmatch(r"\d+(\.\w+)*", spec):
        unpack(fetch_sdist(host, spec, cache=cache, python=python, offline=offline), folder)
    else:
        raise UsageError(
            f"--source {urls(spec)!r} is not a folder, a file, a version or a git+https URL",
            hint="--source ~/DeepSpeed, --source deepspeed-0.19.8.tar.gz, --source 0.19.8 or --source git+https://...",
        )
    for needed in ("setup.py", "version.txt", "op_builder/all_ops.py"):
        if not (folder / needed).is_file():
            raise UsageError(
                f"{urls(spec)} is not a DeepSpeed source: it has no {needed}", hint="name the folder that holds it"
            )
    limit = newest_limit(host, cache, offline=offline) if spec == NEWEST else ""
    return LaidOut(folder=folder, asked=urls(spec), commit=commit, limit=limit)


def digest(folder: Path) -> str:
    """The sha256 over the sorted relative names, file modes and contents of a tree; of a link, over the text of its target."""
    total = hashlib.sha256()
    for path in sorted(_files(folder)):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            kind, content = b"l", os.fsencode(path.readlink())
        else:
            kind, content = b"x" if os.access(path, os.X_OK) else b"f", path.read_bytes()
        total.update(b"%s %d %b\n" % (kind, len(content), name.encode()))
        total.update(content)
    return total.hexdigest()


def digest_here(host: LocalHost, spec: str | None, installed: DeepSpeed | None, cache: Path) -> str | None:
    """What identifies a source without copying it; None for one that would have to be fetched first."""
    wanted, _ = spell_source(spec, installed)
    place = Path(os.path.expanduser(wanted))  # noqa: PTH111
    if place.is_dir():
        # files behind a link that leads out of the tree are not part of its digest
        inside = real_path(place) + "/"
        outward = any(path.is_symlink() and not real_path(path).startswith(inside) for path in place.rglob("*"))
        return None if outward else f"{digest(place)} {_commit(host, place)}"
    sdist = place if place.is_file() else cache / "sdists" / f"deepspeed-{wanted}.tar.gz"
    return sha256_of(sdist) if sdist.is_file() else None


def newest_limit(host: LocalHost, cache: Path, *, offline: bool) -> str:
    """What keeps "newest" from being the newest there is; "" where nothing is known to."""
    return offline_limit([*(cache / "sdists").glob("deepspeed-*.tar.gz")]) if offline else constraint_limit(host)


def _clone(host: LocalHost, url: str, folder: Path, *, offline: bool) -> str | None:
    if offline and not url.startswith("file:"):
        raise UsageError(f"{urls(url)} cannot be fetched with --offline", hint="name a folder or a file with --source")
    address, _, reference = url.rpartition("@") if "@" in url.rpartition("/")[2] else (url, "", "")
    if not GIT_ADDRESS.match(address) or reference.startswith("-"):
        raise UsageError(
            f"{urls(url)} is not an address that dsdoctor passes to git",
            hint="name one as in: --source git+https://host/DeepSpeed@main",
        )
    folder.mkdir(parents=True)
    child = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file"}
    for step in (
        ["init", "--quiet"],
        ["fetch", "--quiet", "--depth", "1", "--", address, reference or "HEAD"],
        ["checkout", "--quiet", "FETCH_HEAD"],
    ):
        answer = host.run(["git", "-C", str(folder), *step], timeout=FETCH_TIMEOUT_SECONDS, env=child)
        if not answer.ok:
            message = f"git could not fetch {urls(url)}: {why_failed(host, answer.stderr)}"
            raise failed_fetch(message, answer.stderr, "check the address and the branch, tag or commit after '@'")
    return _commit(host, folder)


def _commit(host: LocalHost, folder: Path) -> str | None:
    """The commit of a git work tree; None for a folder that is not the top of one."""
    answer = host.run(["git", "-C", str(folder), "rev-parse", "--show-toplevel", "HEAD"], timeout=20)
    lines = answer.stdout.splitlines()
    return lines[1] if answer.ok and len(lines) == 2 and lines[0] == real_path(folder) else None


def _files(folder: Path) -> Iterable[Path]:
    skipped = {".git", "__pycache__"}
    found = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return (path for path in found if not skipped.intersection(path.relative_to(folder).parts))
