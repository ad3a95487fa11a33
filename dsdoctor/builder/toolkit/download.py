"""Downloads: a small document, a file whose sha256 is known beforehand, wheels by pip. https, or what the user named.

Proxies and certificates are those of the environment (https_proxy, SSL_CERT_FILE). What a broken download left is continued, and
nothing takes its name before its digest is right.
"""

import base64
import http.client
import io
import os
import re
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit

from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.files import sha256_of
from dsdoctor.core.host import LocalHost
from dsdoctor.core.pip import failed_fetch, pip_for, run_pip, why_failed
from dsdoctor.core.release import __version__

CHUNK_BYTES = 1 << 18
SILENCE_TIMEOUT_SECONDS = 30.0
"""Seconds without a byte after which a connection is given up."""

MAX_TIMEOUTS = 3
"""How many times the limit of an answer the whole document may take: a server that sends byte by byte is not waited for."""

DOWNLOAD_TIMEOUT_SECONDS = 3600.0
MAX_ATTEMPTS = 5
REPORT_INTERVAL_SECONDS = 5.0
Say = Callable[[str], None]
NETWORK = (OSError, http.client.HTTPException)
"""What urllib raises where a server or the way to it fails."""

FIRST_WITH_FIGURES = (24, 1)
"""``--progress-bar raw`` is known since this pip: it prints figures, and not only to a terminal."""

QUIET = ("--quiet", "--disable-pip-version-check")


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https to http."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urlsplit(req.full_url).scheme == "https" and urlsplit(newurl).scheme != "https":
            raise OSError(f"it redirects to {shown(newurl)}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Meter:
    """Says how far a download is: every few seconds, and at its end."""

    def __init__(self, say: Say, name: str, total: int, begun: int = 0) -> None:
        self._say, self._name, self._total, self._begun = say, name, total, begun
        self._started = self._reported = time.monotonic()

    def at(self, done: int) -> None:
        """So many bytes are there."""
        now = time.monotonic()
        if done >= self._total or now - self._reported >= REPORT_INTERVAL_SECONDS:
            self._reported = now
            speed = (done - self._begun) / max(now - self._started, 0.001)
            share = 100 * done // max(self._total, 1)
            self._say(
                f"{self._name}: {done / 1e6:.1f} of {self._total / 1e6:.1f} MB ({share} %), {speed / 1e6:.1f} MB/s"
            )


def read_document(url: str, *, most: int, timeout: float) -> bytes | None:
    """A document of at most ``most`` bytes; None where the server has none of that name.

    Raises OSError for a server that cannot be reached, and for a document that is larger or takes too long.
    """
    try:
        with _opened(url, timeout=timeout) as answer:
            content = _whole(answer, most, time.monotonic() + MAX_TIMEOUTS * timeout)
    except HTTPError as error:
        if error.code in {403, 404, 410}:
            # a bucket without a listing says 403 for what it does not hold
            return None
        raise OSError(f"{shown(url)} answers {error.code} {error.reason}") from None
    except URLError as error:
        if isinstance(error.reason, FileNotFoundError):
            return None
        raise OSError(f"{shown(url)} cannot be reached: {error.reason}") from None
    except http.client.HTTPException as error:
        raise OSError(f"{shown(url)} does not answer in HTTP: {error!r}") from None
    except TimeoutError:
        raise OSError(f"{shown(url)} does not answer in time") from None
    if len(content) > most:
        raise OSError(f"{shown(url)} is larger than {most:,} bytes")
    return bytes(content)


def download(url: str, target: Path, *, sha256: str, size: int, name: str, say: Say) -> None:
    """Fetch a file, or take the one that is there if its digest is right. Raises BuildFailed; a wrong file is not left behind.

    The caller holds the lock of the folder.
    """
    if _is_right(target, sha256, size):
        say(f"{name}: already downloaded, sha256 verified")
        return
    target.unlink(missing_ok=True)
    part = target.with_name(f"{target.name}.part")
    continued = part.exists()
    _fetch(url, part, size=size, name=name, say=say)
    if continued and not _is_right(part, sha256, size):
        say(f"{name}: an earlier partial download was damaged; starting over")
        part.unlink()
        _fetch(url, part, size=size, name=name, say=say)
    if not _is_right(part, sha256, size):
        found = sha256_of(part)
        part.unlink()
        raise BuildFailed(
            f"{name} from {shown(url)} does not match the manifest: its sha256 is {found}, expected {sha256}",
            hint="a proxy or mirror may have changed it; rerun, or set DSDOCTOR_CUDA_REDIST to another mirror",
        )
    part.replace(target)


def shown(url: str) -> str:
    """A URL without user and password.

    >>> shown("https://me:secret@mirror.example/cuda/x.json")
    'https://mirror.example/cuda/x.json'
    """
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def download_wheels(
    host: LocalHost, requirements: Sequence[str], into: Path, *, python: str, hint: str, say: Say
) -> tuple[Path, ...]:
    """The wheels of requirements and of what they need, each compared by pip with its index's digest. Raises BuildFailed."""
    what = ", ".join(requirements)
    pip, _ = pip_for(host, python, what)
    version = parse_pip_version(host.run([*pip, "--version"], timeout=60).stdout)
    wanted = ["--only-binary=:all:", "--dest", str(into), *requirements]
    if version < FIRST_WITH_FIGURES:
        run_pip(host, python, ["download", *QUIET, *wanted], what=what, hint=hint)
    else:
        _with_figures(host, [*pip, "download", "--disable-pip-version-check", *wanted], what=what, hint=hint, say=say)
    return tuple(sorted(into.glob("*.whl")))


def parse_pip_version(text: str) -> tuple[int, int]:
    """What ``pip --version`` says; (0, 0) where it says nothing.

    >>> parse_pip_version("pip 25.3 from /env/lib/python3.12/site-packages/pip (python 3.12)")
    (25, 3)
    """
    found = re.match(r"pip (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _whole(answer: http.client.HTTPResponse, most: int, deadline: float) -> bytearray:
    content = bytearray()
    while len(content) <= most and (chunk := answer.read1(CHUNK_BYTES)):
        content += chunk
        if time.monotonic() > deadline:
            raise TimeoutError
    return content


def _fetch(url: str, part: Path, *, size: int, name: str, say: Say) -> None:
    """Fill a file up to its size, over broken connections."""
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_SECONDS
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            _continue(url, part, size=size, meter=Meter(say, name, size, _size(part)), deadline=deadline)
        except HTTPError as error:
            raise _failed(name, url, f"{error.code} {error.reason}") from None
        except NETWORK as error:
            if isinstance(error, OSError) and not isinstance(error, URLError) and error.filename is not None:
                # the disk, not the network
                raise
            if attempt == MAX_ATTEMPTS or time.monotonic() > deadline:
                raise _failed(name, url, str(error) or repr(error)) from None
        if _size(part) == size:
            return
        say(f"{name}: the connection broke at {_size(part) / 1e6:.1f} of {size / 1e6:.1f} MB; resuming")
    raise _failed(name, url, f"it ends after {_size(part):,} of {size:,} bytes")


def _continue(url: str, part: Path, *, size: int, meter: Meter, deadline: float) -> None:
    have = _size(part)
    if have > size:
        part.unlink()
        have = 0
    if have == size:
        return
    with _opened(url, timeout=SILENCE_TIMEOUT_SECONDS, start=have) as answer:
        if have and not _continues(answer, have):
            have = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_APPEND if have else os.O_TRUNC)
        with io.FileIO(os.open(part, flags, 0o600), "wb") as file:
            # what there is, not a whole chunk: a kill loses nothing of it
            while chunk := answer.read1(min(CHUNK_BYTES, size - have + 1)):
                have += len(chunk)
                if have > size:
                    raise OSError(f"it is longer than the {size:,} bytes that were announced")
                if time.monotonic() > deadline:
                    raise OSError(f"it takes longer than {DOWNLOAD_TIMEOUT_SECONDS:.0f} s")
                _write(file, chunk, part)
                meter.at(have)


def _write(file: io.FileIO, content: bytes, path: Path) -> None:
    """All of it, as the disk takes it; a disk that is full says which file it was."""
    left = memoryview(content)
    while left:
        try:
            left = left[file.write(left) or 0 :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None


def _continues(answer: http.client.HTTPResponse, have: int) -> bool:
    """Whether an answer begins where we are: a server may send the whole file."""
    return getattr(answer, "status", None) == 206 and answer.headers.get("Content-Range", "").startswith(
        f"bytes {have}-"
    )


def _opened(url: str, *, timeout: float, start: int = 0) -> http.client.HTTPResponse:
    parts = urlsplit(url)
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        # a Python that was compiled without OpenSSL has none: the answer is then that https is unknown
        *([urllib.request.HTTPSHandler()] if hasattr(urllib.request, "HTTPSHandler") else []),
        urllib.request.FileHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _SafeRedirects(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    request = urllib.request.Request(shown(url), headers={"User-Agent": f"dsdoctor/{__version__}"})  # noqa: S310
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        # unredirected: another host that is redirected to does not get it
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(pair).decode()}")
    if start:
        request.add_header("Range", f"bytes={start}-")
    answer: http.client.HTTPResponse = opener.open(request, timeout=timeout)
    return answer


def _failed(name: str, url: str, why: str) -> BuildFailed:
    return BuildFailed(
        f"{name} could not be fetched from {shown(url)}: {why}",
        hint="rerun to resume. Set DSDOCTOR_CUDA_REDIST to a mirror, or to none to use the distribution's package",
    )


def _is_right(path: Path, sha256: str, size: int) -> bool:
    return path.is_file() and not path.is_symlink() and _size(path) == size and sha256_of(path) == sha256


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _with_figures(host: LocalHost, argv: Sequence[str], *, what: str, hint: str, say: Say) -> None:
    lines: list[str] = []
    name = what
    meter: Meter | None = None

    def on_line(line: str) -> None:
        nonlocal name, meter
        line = line.strip()
        if figures := re.fullmatch(r"Progress (\d+) of (\d+)", line):
            meter = meter or Meter(say, name, int(figures[2]))
            meter.at(int(figures[1]))
            return
        if begun := re.match(r"Downloading (?:\S*/)?(\S+)", line):
            name, meter = begun[1], None
        lines.append(line)

    argv = [*argv, "--progress-bar", "raw"]
    status = host.stream(argv, cwd=Path.cwd(), env=host.environment(), on_line=on_line)
    if status:
        output = "\n".join(lines)
        raise failed_fetch(f"pip could not fetch {what}: {why_failed(host, output)}", output, hint)
