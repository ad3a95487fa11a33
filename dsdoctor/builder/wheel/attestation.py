"""The files beside a wheel that attest where it comes from -> what they state. No signature is checked, nothing is fetched.

Read are Sigstore's bundles, one or one a line (GitHub's `gh attestation download`, `python -m sigstore sign`, cosign), plain DSSE
envelopes of in-toto statements (`.intoto.jsonl`), and PyPI's attestation and provenance objects (PEP 740).
"""

import base64
import binascii
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.builder.wheel.read import hex_of
from dsdoctor.core.finding import Finding, Step, step
from dsdoctor.core.text import and_more

# A signing certificate (X.509, DER) -> whom it names. Its own signature is not checked, and neither is its issuer's.


LARGEST_CERTIFICATE = 64 << 10
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
    if len(certificate) > LARGEST_CERTIFICATE:
        return Signer()
    found = dict(_extensions(certificate, DEEPEST))
    names = [name for tag, value in _elements(found.get(ALTERNATIVE_NAME, b"")) for name in _subject_names(tag, value)]
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


def _subject_names(tag: int, value: bytes) -> Iterator[str]:
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


# What the attestations beside a wheel state, against the wheel -> findings. That one is genuine is never said: that takes the
# signature, Sigstore's certificates and its log, which `gh` and `sigstore` check.


KINDS = {
    "https://slsa.dev/provenance/v1": "build provenance",
    "https://slsa.dev/provenance/v0.2": "build provenance",
    "https://docs.pypi.org/attestations/publish/v1": "publication on PyPI",
    "https://cyclonedx.org/bom": "bill of materials",
    "https://spdx.dev/Document/v2.3": "bill of materials",
    "https://in-toto.io/attestation/release/v0.1": "release",
    "https://in-toto.io/attestation/release/v0.2": "release",
    "": "signature over the file",
}
PROVENANCE = "https://slsa.dev/provenance/v1"
"""What `gh attestation verify` asks for by itself."""

ON_GITHUB = re.compile(
    r"https://github\.com/([A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+?)(?:\.git)?(?:[/@].*)?", re.ASCII
)
GITHUB = "https://token.actions.githubusercontent.com"
FEW = 3
NO_OPTION = re.compile(r"[A-Za-z0-9]")


def judge_attestations(wheel: Path) -> tuple[Finding, ...]:
    """One finding for each attestation beside a wheel; none where there is none."""
    if not may_have_attestation(wheel):
        return ()
    digest = hex_of(wheel)
    return tuple(_judged(wheel, digest, path) for path in attestation_files(wheel, digest))


def _judged(wheel: Path, digest: str, path: Path) -> Finding:
    try:
        statements = read_attestation(path)
    except Unreadable as error:
        return Finding.warning(
            "attestation-unreadable",
            f"{path.name} lies beside the wheel and cannot be read as its attestation: {error}",
            fix="fetch the attestation again from where the wheel comes from; without one, nothing attests the wheel",
        )
    fitting = [statement for statement in statements if any(digest == other for _, other in statement.subjects)]
    against = [statement for statement in statements if statement not in fitting and _names(statement, wheel)]
    if against or not fitting:
        return _of_another(wheel, digest, path, (*against, *statements)[0])
    return _not_checked(wheel, path, fitting[0])


def _names(statement: Statement, wheel: Path) -> bool:
    return any(name.rpartition("/")[2] == wheel.name for name, _ in statement.subjects)


def _of_another(wheel: Path, digest: str, path: Path, statement: Statement) -> Finding:
    told = [f"{name or 'a file'} with sha256 {_shown(other)}" for name, other in statement.subjects]
    return Finding.error(
        "attestation-other-wheel",
        f"{path.name} attests another file than {wheel.name}: their sha256 differ",
        evidence=[f"the wheel has sha256 {digest}", f"it attests {and_more([_shown(one) for one in told], FEW)}"],
        fix="do not install it: fetch the wheel and its attestation again, both from where they were published",
    )


def _not_checked(wheel: Path, path: Path, statement: Statement) -> Finding:
    kind = KINDS.get(statement.kind)
    what = kind or f"statement of a type that dsdoctor does not know ({_shown(statement.kind)})"
    repository = _repository(statement)
    fix, steps = _check(wheel, path, statement, repository)
    return Finding.note(
        "attestation-not-checked",
        f"{path.name} attests this very wheel ({what}), and its signature was not checked: anybody can write such a file",
        evidence=_claims(statement),
        fix=fix,
        steps=steps,
    )


def _claims(statement: Statement) -> list[str]:
    claims = {
        "signed, it says, by": statement.signer.identity,
        "for the repository": statement.signer.repository,
        "built, it says, from": statement.repository,
    }
    return [f"{words} {_shown(value)}" for words, value in claims.items() if value]


def _check(wheel: Path, path: Path, statement: Statement, repository: str | None) -> tuple[str, tuple[Step, ...]]:
    """How the signature is checked: the tool depends on the form and on who signed."""
    identity, issuer = (
        told if told and NO_OPTION.match(told) else None
        for told in (statement.signer.identity, statement.signer.issuer)
    )
    if statement.form == "pypi" and identity and path.name.endswith((".publish.attestation", ".slsa.attestation")):
        fix = (
            f"check it, if you expect the wheel from {_shown(identity)}; pip install pypi-attestations brings the tool"
        )
        line = step(
            "pypi-attestations verify attestation --identity {identity} {wheel}", identity=identity, wheel=str(wheel)
        )
        return fix, (line,)
    # gh checks only what GitHub's workflows signed
    if identity and issuer and (not statement.kind or issuer != GITHUB):
        fix = f"check it, if you expect the wheel from {_shown(identity)}; pip install sigstore brings the tool"
        line = step(
            "python -m sigstore verify identity --bundle {bundle} --cert-identity {identity} --cert-oidc-issuer {issuer} {wheel}",
            bundle=str(path),
            identity=identity,
            issuer=issuer,
            wheel=str(wheel),
        )
        return fix, (line,)
    if repository is None or statement.form != "bundle" or not NO_OPTION.match(statement.kind):
        return "ask whoever made the wheel how its signature is checked; the file names no repository on GitHub", ()
    return f"check it, if {repository} is where you expect the wheel from; GitHub's gh does that", (
        _by_gh(wheel, path, statement, repository),
    )


def _by_gh(wheel: Path, path: Path, statement: Statement, repository: str) -> Step:
    given = {"wheel": str(wheel), "repository": repository, "bundle": str(path), "kind": statement.kind}
    # gh takes files of these two endings only, and without one it asks GitHub for the attestation
    bundled, usual = path.suffix in {".json", ".jsonl"}, statement.kind == PROVENANCE
    if bundled and usual:
        line = step("gh attestation verify {wheel} --repo {repository} --bundle {bundle}")
    elif bundled:
        line = step("gh attestation verify {wheel} --repo {repository} --bundle {bundle} --predicate-type {kind}")
    elif usual:
        line = step("gh attestation verify {wheel} --repo {repository}")
    else:
        line = step("gh attestation verify {wheel} --repo {repository} --predicate-type {kind}")
    return line.filled(given)


def _repository(statement: Statement) -> str | None:
    """OWNER/REPO on GitHub, as the certificate names it, else as the statement does.

    >>> _repository(Statement(subjects=(), repository="https://github.com/deepspeedai/DeepSpeed.git"))
    'deepspeedai/DeepSpeed'
    """
    for url in (statement.signer.repository, statement.repository, statement.signer.identity):
        if url and (found := ON_GITHUB.fullmatch(url)):
            return found[1]
    return None


def _shown(text: str) -> str:
    """A few of somebody else's characters, printable ones."""
    return "".join(char if char.isprintable() else "?" for char in text[:160]) + ("..." if len(text) > 160 else "")
