"""The sdists that are kept in the cache, each with the sha256 that the package index told. One that differs is not used."""

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import msgspec
from filelock import FileLock

from dsdoctor.builder.source.newest import newest_sdist
from dsdoctor.core.errors import BuildFailed, ImpossiblePlan, UsageError
from dsdoctor.core.files import read_limited, write_bytes
from dsdoctor.core.host import LocalHost
from dsdoctor.core.pip import OTHER_HASH, run_pip
from dsdoctor.core.text import decode, encode
from dsdoctor.core.workspace import private_folder

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
                f"{sdist} is not used: its digest was not recorded, and --offline forbids to fetch it",
                hint=f"run it once without --offline, or trust the file: --source {quote(str(sdist))}",
            )
    if offline:
        raise UsageError(
            f"the sdist of DeepSpeed ({version}) is not in {folder}, and --offline forbids to fetch it",
            hint="run it once without --offline, or name a folder or a file with --source",
        )
    with FileLock(folder / ".lock", mode=0o600):
        return _download(host, version, folder, python)


def sha256_of(path: Path) -> str:
    """The sha256 of a file of any size, in hexadecimal digits."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()


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
        hint=f"rm {quote(str(sdist))}, and run the same command again: it is fetched anew",
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
            raise BuildFailed(f"pip fetched {requirement}, and it is not a .tar.gz", hint="name a file with --source")
        told = _ask_index(child, python, found[0], temporary / "report.json")
        # the record first: an sdist without one is fetched again
        write_bytes(_record_of(folder / found[0].name), encode(told))
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
        told = _parse_report(read_limited(report))
    except (BuildFailed, OSError):
        told = None
    if told is None:
        return FetchedSdist(sha256=fetched)
    if told.sha256 != fetched:
        raise BuildFailed(
            f"{sdist.name} came with sha256 {fetched}, and the package index says {told.sha256}: it is not used",
            hint=f"it is at {told.url}; {OTHER_HASH}",
        )
    return told


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
