"""Package indexes of wheels: one that is written, one on the network that is read. Nothing of a wheel is run.

What is written is a folder that pip can use (PEP 503, with metadata files, PEP 658): ``DIR/deepspeed/`` holds the wheels, their
manifests and metadata, ``index.html`` there the links. Any web server can serve it, and so can ``file://``. Every file appears by
rename; the pages are written again from the wheels that are there. What is read is the Simple API, HTML or JSON (PEP 503, 691); a
name says much before anything is fetched.
"""

import hashlib
import html
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import requests
from bs4 import ParserRejectedMarkup
from packaging.metadata import parse_email
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from pypi_simple import ACCEPT_ANY, ProjectPage, UnsupportedContentTypeError, UnsupportedRepoVersionError
from requests.adapters import HTTPAdapter

from dsdoctor.builder.wheel.read import hex_of
from dsdoctor.core import redaction
from dsdoctor.core.errors import BuildFailed, UsageError
from dsdoctor.core.files import PRIVATE, make_folder, open_regular, read_limited, replacing, write_bytes
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import DeepSpeed
from dsdoctor.core.zip_file import BadZip, read_bytes, read_entries

PROJECT = "deepspeed"
NOT_TO_BE_USED = "do not use the wheel; report it to the index's maintainer"
Digests = tuple[tuple[str, str], ...]
"""What an index says of a file: names of algorithms, each with hexadecimal digits."""

MAX_METADATA_BYTES = 16 << 20
PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body>
{body}</body>
</html>
"""

TIMEOUTS_SECONDS = (15.0, 60.0)
"""Seconds to connect, and without a byte."""

MAX_WHEEL_BYTES = 8 << 30
MAX_PAGE_BYTES, MAX_TAGS = 4 << 20, 50_000
"""A page with a thousand wheels has half a MB and a few thousand tags."""

PAGE_TIMEOUT_SECONDS = 120.0
MIN_BYTES_PER_SECOND = 1024
ALGORITHMS = {"md5", "sha1", "sha224", "sha256", "sha384", "sha512"}
NO_INDEX = (UnsupportedContentTypeError, UnsupportedRepoVersionError, ValueError, ParserRejectedMarkup)
CHUNK_BYTES = 1 << 20
CUDA_IN_NAME = re.compile(r"cu(?:da)?\.?(\d{2})\.?(\d)(?!\d)")
TORCH_IN_NAME = re.compile(r"(?:torch|pt)\.?(\d)\.?(\d{1,2})(?!\d)")
CERTIFICATES = ("REQUESTS_CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE")


class NoIndex(ValueError):
    """Why an answer is no page of a package index, in words of ours."""


@dataclass(frozen=True, kw_only=True)
class RemoteWheel:
    """A wheel that an index lists. ``digests`` (algorithm, hexadecimal digits) and ``size`` (bytes) are what the index says."""

    name: str
    url: str
    digests: Digests = ()
    size: int | None = None
    yanked: bool = False

    @property
    def shown(self) -> str:
        """Its address without user, query and fragment: they may be secrets."""
        return redaction.index_url(self.url)


def publish(wheel: Path, index: Path) -> Path:
    """Copy a wheel, with the manifest beside it, into an index and list it. Returns the path of the copy."""
    folder = index / PROJECT
    make_folder(folder)
    manifest = wheel.with_name(f"{wheel.name}.json")
    for source in (manifest, wheel):
        if source.exists():
            with source.open("rb") as content, replacing(folder / source.name) as copy:
                shutil.copyfileobj(content, copy)
    list_wheels(index)
    return folder / wheel.name


def list_wheels(index: Path) -> None:
    """Write the pages of an index for the wheels that are in it."""
    links = [_link(wheel) for wheel in wheels_of(index)]
    _write(index / PROJECT / "index.html", PAGE.format(title=f"Links for {PROJECT}", body="".join(links)).encode())
    root = f'<a href="{PROJECT}/">{PROJECT}</a>\n'
    _write(index / "index.html", PAGE.format(title="Simple index", body=root).encode())


def wheels_of(folder: Path) -> tuple[Path, ...]:
    """The DeepSpeed wheels of a folder or of an index, sorted by name."""
    inside = folder / PROJECT
    return tuple(sorted((inside if inside.is_dir() else folder).glob(f"{PROJECT}-*.whl")))


def listed_digests(folder: Path) -> Mapping[str, Digests]:
    """What the page of a folder's index says of its wheels; nothing where there is no page, or none that can be read."""
    try:
        content = read_limited(folder / "index.html", MAX_PAGE_BYTES)
        if content.count(b"<") > MAX_TAGS:
            return {}
        packages = ProjectPage.from_html(PROJECT, content).packages
    except (OSError, *NO_INDEX, RecursionError, MemoryError):
        return {}
    return {package.filename: tuple(sorted(package.digests.items())) for package in packages if package.digests}


def contradicted_digest(path: Path, listed: Digests, known: Mapping[str, str] | None = None) -> str:
    """How a file differs from what its index says of it, "" where it does not. ``known`` are digests of it already at hand."""
    for name, value in ((name.lower(), value.lower()) for name, value in listed if name.lower() in ALGORITHMS):
        found = known[name] if known else hex_of(path, name)
        if found != value:
            return f"has {name} {found[:16]}..., its index says {value[:16] or 'nothing'}..."
    return ""


def is_url(text: str) -> bool:
    """Whether a text names something on the network.

    >>> is_url("https://host/simple"), is_url("dist"), is_url("file:///dist")
    (True, False, False)
    """
    return re.match(r"https?://", text, re.IGNORECASE) is not None


def open_session(host: LocalHost) -> requests.Session:
    """A session that goes by the proxies and certificates that pip goes by."""
    session = requests.Session()
    session.mount("https://", HTTPAdapter(max_retries=2))
    bundle = next(filter(None, map(host.variable, CERTIFICATES)), None)
    if bundle is not None:
        session.verify = bundle
    return session


def list_index(url: str, session: requests.Session) -> tuple[RemoteWheel, ...]:
    """The DeepSpeed wheels of an index, or the one that the address names itself. Raises UsageError, BuildFailed."""
    try:
        if urlsplit(url).path.endswith(".whl"):
            return (_named(url),)
        answer = _page(url, session)
        packages = ProjectPage.from_response(answer, PROJECT).packages if answer is not None else []
    except (*NO_INDEX, RecursionError, MemoryError) as error:
        title = f"{redaction.index_url(url)} is not a package index: {_why_none(error)}"
        raise UsageError(title, hint="use the address that you would pass to pip as --index-url") from None
    except requests.RequestException as error:
        raise _unreached(url, error) from None
    return tuple(
        RemoteWheel(
            name=package.filename,
            url=package.url,
            digests=tuple(sorted(package.digests.items())),
            size=package.size,
            yanked=package.is_yanked,
        )
        for package in packages
        if package.package_type == "wheel"
    )


def facts_of_name(name: str) -> DeepSpeed | None:
    """What a wheel's name says of it: version, Python, platform, and the torch and CUDA of its local version; None for no wheel.

    >>> facts = facts_of_name("deepspeed-0.18.9+cu.12.8.torch.2.11-cp312-cp312-linux_x86_64.whl")
    >>> facts.version, facts.cuda, facts.torch, facts.python
    ('0.18.9+cu.12.8.torch.2.11', '12.8', '2.11', ('cp312',))
    """
    try:
        project, version, _, tags = parse_wheel_filename(name)
    except InvalidWheelFilename:
        return None
    if project != PROJECT:
        return None
    cuda, torch = (pattern.search(version.local or "") for pattern in (CUDA_IN_NAME, TORCH_IN_NAME))
    return DeepSpeed(
        version=str(version),
        location=name,
        cuda=f"{cuda[1]}.{cuda[2]}" if cuda else None,
        torch=f"{torch[1]}.{torch[2]}" if torch else None,
        python=tuple(sorted({tag.interpreter for tag in tags})),
        platform=tuple(sorted({tag.platform for tag in tags})),
        told_by="name",
    )


def fetch(
    wheel: RemoteWheel, folder: Path, session: requests.Session, *, say: Callable[[str], None]
) -> tuple[Path, str]:
    """The wheel as a file in a folder, and its sha256.

    Raises BuildFailed where it does not come whole, or is not what the index says.
    """
    size = f" ({wheel.size / (1 << 20):.1f} MiB)" if wheel.size else ""
    say(f"fetching {wheel.shown}{size}")
    path, length, started = folder / wheel.name, 0, time.monotonic()
    listed = {name.lower() for name, _ in wheel.digests}
    totals = {name: hashlib.new(name) for name in {"sha256", *(ALGORITHMS & listed)}}
    try:
        with (
            session.get(wheel.url, stream=True, timeout=TIMEOUTS_SECONDS) as answer,
            replacing(path, mode=PRIVATE) as file,
        ):
            answer.raise_for_status()
            for chunk in answer.iter_content(CHUNK_BYTES):
                length += len(chunk)
                _refuse_endless(wheel, length, time.monotonic() - started)
                for total in totals.values():
                    total.update(chunk)
                file.write(chunk)
    except requests.RequestException as error:
        raise _unreached(wheel.url, error) from None
    if other := contradicted_digest(path, wheel.digests, {name: total.hexdigest() for name, total in totals.items()}):
        raise BuildFailed(f"{wheel.shown} {other}", hint=NOT_TO_BE_USED)
    return path, totals["sha256"].hexdigest()


def _link(wheel: Path) -> str:
    attributes = [("href", f"{quote(wheel.name)}#sha256={hex_of(wheel)}")]
    metadata = _metadata(wheel)
    if metadata is not None:
        _write(wheel.with_name(f"{wheel.name}.metadata"), metadata)
        attributes += [("data-core-metadata", f"sha256={sha256(metadata).hexdigest()}")]
        attributes += [("data-requires-python", asked) for asked in _requires_python(metadata)]
    written = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes)
    return f"<a {written}>{html.escape(wheel.name)}</a><br>\n"


def _metadata(wheel: Path) -> bytes | None:
    """The METADATA file of a wheel; None for one that cannot be read: it is listed without metadata."""
    try:
        with open_regular(wheel) as file:
            entries = (entry for entry in read_entries(file) if entry.name.endswith(".dist-info/METADATA"))
            entry = next((entry for entry in entries if entry.size <= MAX_METADATA_BYTES), None)
            return None if entry is None else b"".join(read_bytes(file, entry))
    except (OSError, BadZip):
        return None


def _requires_python(metadata: bytes) -> Iterator[str]:
    asked = parse_email(metadata)[0].get("requires_python")
    if asked:
        yield asked


def _write(path: Path, content: bytes) -> None:
    """Write a file in one step, unless it has that content already."""
    if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
        write_bytes(path, content)


def _page(url: str, session: requests.Session) -> requests.Response | None:
    """The project's page, whole; None where the index has none. Raises NoIndex for what is too large to be one."""
    address = f"{url.partition('#')[0].partition('?')[0].rstrip('/')}/{PROJECT}/"
    asked = {"Accept": ACCEPT_ANY, "Accept-Encoding": "identity"}
    started = time.monotonic()
    with session.get(address, headers=asked, stream=True, timeout=TIMEOUTS_SECONDS) as answer:
        if answer.status_code == requests.codes.not_found:
            return None
        answer.raise_for_status()
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise NoIndex("it is compressed, but no compression was requested")
        data = bytearray()
        for chunk in answer.iter_content(1 << 14):
            data += chunk
            if len(data) > MAX_PAGE_BYTES:
                raise NoIndex(f"its page has more than {MAX_PAGE_BYTES >> 20} MiB")
            if time.monotonic() - started > PAGE_TIMEOUT_SECONDS:
                raise NoIndex(f"its page was not complete after {PAGE_TIMEOUT_SECONDS:.0f} s")
        if data.count(b"<") > MAX_TAGS:
            raise NoIndex(f"its page has more than {MAX_TAGS} tags")
        answer._content = bytes(data)
        return answer


def _refuse_endless(wheel: RemoteWheel, length: int, seconds: float) -> None:
    """Raise BuildFailed for more bytes than the index said, or than a wheel can have, and for a drip."""
    if length > (wheel.size if wheel.size is not None else MAX_WHEEL_BYTES):
        raise BuildFailed(f"{wheel.shown} is larger than its index says, or than any wheel", hint="do not use it")
    if seconds > PAGE_TIMEOUT_SECONDS and length / seconds < MIN_BYTES_PER_SECOND:
        raise BuildFailed(
            f"{wheel.shown} arrived at only {length / seconds:.0f} bytes a second", hint="try another mirror"
        )


def _named(url: str) -> RemoteWheel:
    parts = urlsplit(url)
    digests = tuple(re.findall(r"(?:^|&)(\w+)=([^&]*)", parts.fragment))
    name = unquote(parts.path.rpartition("/")[2])
    if "/" in name or facts_of_name(name) is None:
        raise UsageError(
            f"{redaction.index_url(url)} is not a DeepSpeed wheel", hint="name a deepspeed-...whl, or an index"
        )
    return RemoteWheel(name=name, url=url, digests=digests)


def _unreached(url: str, error: requests.RequestException) -> BuildFailed:
    status = f"it answers {error.response.status_code}" if error.response is not None else _error_text(error)
    return BuildFailed(
        f"{redaction.index_url(url)} cannot be read: {status}", hint="check the address, the proxy and the network"
    )


def _why_none(error: Exception) -> str:
    """Why an answer could not be read as an index's. What a parser says of it may hold anything, and is not repeated."""
    if isinstance(error, NoIndex):
        return str(error)
    if isinstance(error, UnsupportedContentTypeError):
        return f"it returned {error.content_type[:60]!r} instead of HTML or JSON"
    if isinstance(error, requests.RequestException):
        return "the address is malformed"
    return "its page is nested too deep" if isinstance(error, RecursionError) else "its page is malformed"


def _error_text(error: Exception) -> str:
    """What an error says, without the address, in which there may be a password.

    >>> _error_text(requests.ConnectionError("host='h', url: /?token=x (Caused by E('[Errno 111] Connection refused'))"))
    '[Errno 111] Connection refused'
    """
    plain = re.search(
        r"\[Errno -?\d+\] [\w ]+|certificate verify failed: [\w ]+|timed out|Name or service not known", str(error)
    )
    return plain[0] if plain else f"the connection failed ({type(error).__name__})"
