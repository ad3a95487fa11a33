"""The files beside a wheel that attest where it comes from -> what they state. No signature is checked, nothing is fetched.

Read are Sigstore's bundles, one or one a line (GitHub's `gh attestation download`, `python -m sigstore sign`, cosign), plain DSSE
envelopes of in-toto statements (`.intoto.jsonl`), and PyPI's attestation and provenance objects (PEP 740).
"""

import base64
import binascii
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.builder.wheel.certificate import Signer, signer_of

ENDINGS = (
    ".sigstore.json",
    ".sigstore",
    ".sigstore.jsonl",
    ".jsonl",
    ".attestation.json",
    ".intoto.jsonl",
    ".publish.attestation",
    ".slsa.attestation",
    ".attestation",
    ".provenance",
)
"""What follows the wheel's name. `gh attestation download` names the file by the wheel's digest instead."""

BY_DIGEST = ("sha256:{}.jsonl", "sha256-{}.jsonl")
LARGEST = 8 << 20
"""GitHub's have about 10 kB; one that lists everything that went into a build may have some MB."""

MOST = 256
SHA256 = "SHA2_256"
BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError)
WHERE_BUILT = (
    ("buildDefinition", "externalParameters", "workflow", "repository"),
    ("invocation", "configSource", "uri"),
    ("materials", "0", "uri"),
)
"""Where SLSA's provenance v1 of GitHub and its v0.2 say which repository was built."""


class Unreadable(Exception):
    """Why a file is no attestation that can be read."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One attestation: ``subjects`` are pairs of a name ("" where it has none) and a sha256; ``kind`` is its predicate's type,
    "" for a signature over the file alone. ``repository`` is as the statement has it, ``signer`` as the certificate has it."""

    subjects: tuple[tuple[str, str], ...]
    kind: str = ""
    repository: str | None = None
    signer: Signer = field(default_factory=Signer)
    form: str = "bundle"


def attestation_files(wheel: Path, digest: str) -> tuple[Path, ...]:
    """The attestations that lie beside a wheel of this sha256, by their names."""
    names = [f"{wheel.name}{ending}" for ending in ENDINGS] + [pattern.format(digest) for pattern in BY_DIGEST]
    return tuple(path for name in names if os.path.lexists(path := wheel.with_name(name)))


def may_have_attestation(wheel: Path) -> bool:
    """Whether it is worth the time to compute the wheel's digest."""
    by_digest = any(next(wheel.parent.glob(pattern.format("*")), None) for pattern in BY_DIGEST)
    return by_digest or bool(attestation_files(wheel, ""))


def read_attestation(path: Path) -> tuple[Statement, ...]:
    """What a file states. Raises Unreadable with the reason."""
    data = _content(path)
    try:
        documents = [msgspec.json.decode(data)]
    except BROKEN:
        documents = _by_line(data)
    found = [statement for document in documents for statement in _statements(document)]
    if not found:
        raise Unreadable("it holds no attestation: neither a Sigstore bundle nor one of PyPI's attestations")
    return tuple(found)


def _content(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=_without_waiting) as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise Unreadable("it is no file")
            data = opened.read(LARGEST + 1)
    except OSError as error:
        raise Unreadable(f"it cannot be opened: {error.strerror}") from None
    if len(data) > LARGEST:
        raise Unreadable(f"it has more than {LARGEST >> 20} MiB, which no attestation of a wheel needs")
    return data


def _without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes to is opened at once."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _by_line(data: bytes) -> list[Any]:
    lines = [line for line in data.splitlines() if line.strip()]
    if len(lines) > MOST:
        raise Unreadable(f"it has more than {MOST} lines")
    try:
        return [msgspec.json.decode(line) for line in lines]
    except BROKEN:
        raise Unreadable("it is not JSON, neither as a whole nor line by line") from None


def _statements(document: Any) -> Iterator[Statement]:
    """Those of one document, in whichever of the forms it is."""
    if not isinstance(document, dict):
        return
    if "dsseEnvelope" in document:
        envelope = _part(document, "dsseEnvelope")
        yield replace(_of_payload(envelope.get("payload")), signer=_signer(document))
    elif "messageSignature" in document:
        yield Statement(subjects=(("", _message_digest(document)),), signer=_signer(document))
    elif isinstance(document.get("payload"), str) and "payloadType" in document:
        yield replace(_of_payload(document["payload"]), form="envelope")
    elif "envelope" in document and "verification_material" in document:
        statement = _of_payload(_part(document, "envelope").get("statement"))
        certificate = _part(document, "verification_material").get("certificate")
        yield replace(statement, signer=signer_of(_decoded(certificate)), form="pypi")
    else:
        yield from _of_list(document)


def _of_list(document: dict[str, Any]) -> Iterator[Statement]:
    """PyPI's provenance objects, and what GitHub's API answers, are lists of the others."""
    for bundle in _items(document, "attestation_bundles"):
        yield from (statement for inner in _items(bundle, "attestations") for statement in _statements(inner))
    for inner in _items(document, "attestations"):
        yield from _statements(_part(inner, "bundle"))


def _of_payload(payload: Any) -> Statement:
    """An in-toto statement, as it stands in an envelope."""
    try:
        told = msgspec.json.decode(_decoded(payload))
    except BROKEN:
        told = None
    if not isinstance(told, dict) or not _string(told, "_type").startswith("https://in-toto.io/Statement/"):
        raise Unreadable("its envelope holds no in-toto statement")
    subjects = tuple(
        (_string(subject, "name"), _string(_part(subject, "digest"), "sha256").lower())
        for subject in _items(told, "subject")
    )
    if not any(digest for _, digest in subjects):
        raise Unreadable("its statement names no file with a sha256")
    kind = _string(told, "predicateType")
    if not kind:
        raise Unreadable("its statement has no predicate type")
    return Statement(subjects=subjects, kind=kind, repository=_built_of(told.get("predicate")))


def _message_digest(document: dict[str, Any]) -> str:
    told = _part(_part(document, "messageSignature"), "messageDigest")
    digest = _decoded(told.get("digest")) if told.get("algorithm") == SHA256 else b""
    if len(digest) != 32:
        raise Unreadable("its signature names no sha256")
    return digest.hex()


def _built_of(predicate: Any) -> str | None:
    for way in WHERE_BUILT:
        found = predicate
        for name in way:
            if isinstance(found, list):
                found = found[0] if found else None
            else:
                found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, str):
            return found.removeprefix("git+").partition("@")[0]
    return None


def _signer(document: dict[str, Any]) -> Signer:
    material = _part(document, "verificationMaterial")
    chain = _items(_part(material, "x509CertificateChain"), "certificates")
    certificate = chain[0] if chain else _part(material, "certificate")
    return signer_of(_decoded(certificate.get("rawBytes")))


def _decoded(value: Any) -> bytes:
    """The bytes of base64; none where it is none."""
    try:
        return base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):
        return b""


def _string(document: dict[str, Any], name: str) -> str:
    found = document.get(name)
    return found if isinstance(found, str) else ""


def _part(document: Any, name: str) -> dict[str, Any]:
    found = document.get(name) if isinstance(document, dict) else None
    return found if isinstance(found, dict) else {}


def _items(document: Any, name: str) -> list[dict[str, Any]]:
    found = document.get(name) if isinstance(document, dict) else None
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
