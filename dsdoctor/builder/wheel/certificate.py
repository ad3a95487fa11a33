"""A signing certificate (X.509, DER) -> whom it names. Its own signature is not checked, and neither is its issuer's."""

from collections.abc import Iterator
from dataclasses import dataclass

LARGEST = 64 << 10
"""Fulcio's certificates have less than 4 kB."""

DEEPEST = 12
OBJECT_ID, OCTETS, BOOLEAN = 0x06, 0x04, 0x01
CONSTRUCTED, NAMES = 0x20, (0x81, 0x86)
"""Of the kinds of alternative names: an address of e-mail, a URL."""

ALTERNATIVE_NAME = bytes.fromhex("551d11")
ISSUER, REPOSITORY = (bytes.fromhex("2b0601040183bf3001") + number for number in (b"\x08", b"\x0c"))
"""Extensions of Sigstore's certificates: 1.3.6.1.4.1.57264.1.8, who knew the signer, and .12, the repository that was built."""


@dataclass(frozen=True, kw_only=True)
class Signer:
    """Whom a certificate names: ``identity`` is an address or a URL, for GitHub that of the workflow with its ref."""

    identity: str | None = None
    issuer: str | None = None
    repository: str | None = None


def signer_of(certificate: bytes) -> Signer:
    """Whom a certificate names; nobody, where it is no certificate or names nobody.

    >>> signer_of(b"no certificate")
    Signer(identity=None, issuer=None, repository=None)
    """
    if len(certificate) > LARGEST:
        return Signer()
    found = dict(_extensions(certificate, DEEPEST))
    names = [name for tag, value in _elements(found.get(ALTERNATIVE_NAME, b"")) for name in _names(tag, value)]
    return Signer(
        identity=names[0] if names else None,
        issuer=_text(found.get(ISSUER, b"")),
        repository=_text(found.get(REPOSITORY, b"")),
    )


def _extensions(data: bytes, depth: int) -> Iterator[tuple[bytes, bytes]]:
    """Every sequence of an object's id and octets, at any depth, with an optional boolean between the two."""
    inside = list(_elements(data))
    plain = [(tag, value) for tag, value in inside if tag != BOOLEAN]
    if [tag for tag, _ in plain] == [OBJECT_ID, OCTETS]:
        yield plain[0][1], plain[1][1]
    elif depth:
        for tag, value in inside:
            if tag & CONSTRUCTED:
                yield from _extensions(value, depth - 1)


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements that follow each other in DER; it ends where the bytes are none."""
    at = 0
    while at + 2 <= len(data):
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            digits = length & 0x7F
            length = int.from_bytes(data[at : at + digits], "big") if 0 < digits <= 4 else len(data) + 1
            at += digits
        if length > len(data) - at:
            return
        yield tag, data[at : at + length]
        at += length


def _names(tag: int, value: bytes) -> Iterator[str]:
    """Those of an alternative name, which is a sequence of names of several kinds."""
    for inner, name in _elements(value) if tag & CONSTRUCTED else ():
        if inner in NAMES and (text := _printable(name)):
            yield text


def _text(extension: bytes) -> str | None:
    """The string of an extension: DER holds one element, whatever its kind of string."""
    return next((_printable(value) for _, value in _elements(extension)), None)


def _printable(value: bytes) -> str | None:
    try:
        text = value.decode("ascii")
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() and " " not in text else None
