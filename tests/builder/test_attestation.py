"""Attestations beside a wheel, written here in each of their real forms: fitting, of another wheel, malformed, hostile."""

import base64
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.builder.wheel.attestation import LARGEST, MOST, Signer, judge_attestations, signer_of
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.ui.screen import document
from tests.builder.test_wheel import NAME

CONTENT = b"the bytes of a wheel"
OTHER = hashlib.sha256(b"other bytes").hexdigest()
REPOSITORY = "https://github.com/some-owner/Some.Repo_1"
WORKFLOW = f"{REPOSITORY}/.github/workflows/wheels.yml@refs/tags/v1"
GITHUB = "https://token.actions.githubusercontent.com"
Json = dict[str, Any]


def der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content).to_bytes(4, "big").lstrip(b"\0")
    return bytes([tag]) + (bytes([len(content)]) if len(content) < 128 else bytes([0x80 | len(size)]) + size) + content


def certificate(
    identity: str = WORKFLOW, repository: str = REPOSITORY, *, issuer: str = GITHUB, kind: int = 0x86
) -> bytes:
    """As Fulcio makes them, as far as names go: a serial number, a critical alternative name, Sigstore's own extensions."""
    sigstore = bytes.fromhex("2b0601040183bf3001")
    alternative = (der(6, bytes.fromhex("551d11")), der(1, b"\xff"), der(4, der(0x30, der(kind, identity.encode()))))
    extensions = [der(0x30, *alternative)]
    for number, text in ((8, issuer), (12, repository)):
        extensions.append(der(0x30, der(6, sigstore + bytes([number])), der(4, der(12, text.encode()))))
    key = der(0x30, der(0x30, der(6, bytes.fromhex("2a8648ce3d0201"))), der(3, b"\0" + b"\x04" * 65))
    named = der(0x30, der(0xA0, der(2, b"\x02")), der(2, b"\x17" * 20), key, der(0xA3, der(0x30, *extensions)))
    return der(0x30, named, der(0x30, der(6, bytes.fromhex("2a8648ce3d040303"))), der(3, b"\0" + b"s" * 70))


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def statement(digest: str, name: str = NAME, **more: Any) -> Json:
    workflow = {"ref": "refs/tags/v1", "repository": REPOSITORY, "path": ".github/workflows/wheels.yml"}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {"buildDefinition": {"externalParameters": {"workflow": workflow}}},
    } | more


def envelope(of: Json) -> Json:
    kind = "application/vnd.in-toto+json"
    return {"payload": encoded(json.dumps(of).encode()), "payloadType": kind, "signatures": [{"sig": encoded(b"none")}]}


def bundle(of: Json) -> Json:
    material = {"certificate": {"rawBytes": encoded(certificate())}, "tlogEntries": [{"logIndex": "1"}]}
    kind = "application/vnd.dev.sigstore.bundle.v0.3+json"
    return {"mediaType": kind, "verificationMaterial": material, "dsseEnvelope": envelope(of)}


def old_bundle(of: Json) -> Json:
    chain = {"certificates": [{"rawBytes": encoded(certificate())}, {"rawBytes": encoded(certificate("https://ca"))}]}
    return bundle(of) | {"verificationMaterial": {"x509CertificateChain": chain}}


def signed_file(of: Json) -> Json:
    digest = bytes.fromhex(of["subject"][0]["digest"]["sha256"])
    signature = {"messageDigest": {"algorithm": "SHA2_256", "digest": encoded(digest)}, "signature": encoded(b"none")}
    made = bundle(of) | {"messageSignature": signature}
    del made["dsseEnvelope"]
    return made


def pypi(of: Json) -> Json:
    inner = {"statement": encoded(json.dumps(of).encode()), "signature": encoded(b"none")}
    material = {"certificate": encoded(certificate()), "transparency_entries": []}
    return {"version": 1, "verification_material": material, "envelope": inner}


def provenance(of: Json) -> Json:
    publisher = {"kind": "GitHub", "repository": "some-owner/Some.Repo_1", "workflow": "wheels.yml"}
    return {"version": 1, "attestation_bundles": [{"publisher": publisher, "attestations": [pypi(of)]}]}


FORMS: dict[str, Callable[[Json], Json]] = {
    ".sigstore.json": bundle,
    ".jsonl": bundle,
    ".sigstore": old_bundle,
    ".sigstore.jsonl": signed_file,
    ".intoto.jsonl": envelope,
    ".publish.attestation": pypi,
    ".provenance": provenance,
    ".attestation.json": lambda of: {"attestations": [{"bundle": bundle(of)}]},
}
each_form = pytest.mark.parametrize("ending", FORMS)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    path.write_bytes(CONTENT)
    return path


def digest_of(wheel: Path) -> str:
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def judged(wheel: Path, content: bytes | Json, ending: str = ".sigstore.json") -> Finding:
    """The one finding on an attestation, which can be shown and written as JSON."""
    path = wheel.with_name(wheel.name + ending)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    (finding,) = judge_attestations(wheel)
    assert f'"{finding.rule}"' in document("verify", (finding,))
    return finding


@each_form
def test_an_attestation_of_this_wheel_is_a_note_that_its_signature_was_not_checked(wheel: Path, ending: str) -> None:
    finding = judged(wheel, FORMS[ending](statement(digest_of(wheel))), ending)

    assert (finding.rule, finding.severity) == ("attestation-not-checked", Severity.NOTE)
    assert "its signature was not checked" in finding.title
    assert "✓" not in finding.title
    assert any(REPOSITORY in line for line in finding.evidence)


@each_form
def test_an_attestation_of_another_wheel_is_an_error_with_both_digests(wheel: Path, ending: str) -> None:
    finding = judged(wheel, FORMS[ending](statement(OTHER)), ending)

    assert (finding.rule, finding.severity) == ("attestation-other-wheel", Severity.ERROR)
    assert digest_of(wheel) in finding.evidence[0]
    assert OTHER in finding.evidence[1]


def test_the_command_that_checks_the_signature_names_file_repository_and_type(tmp_path: Path) -> None:
    wheel = tmp_path / "a b" / NAME
    wheel.parent.mkdir()
    wheel.write_bytes(CONTENT)
    digest = digest_of(wheel)
    first = f"gh attestation verify '{wheel}' --repo some-owner/Some.Repo_1 --bundle '{wheel}.sigstore.json'"
    spdx = statement(digest, predicateType="https://spdx.dev/Document/v2.3")

    assert judged(wheel, bundle(statement(digest))).fix.commands == (first,)
    assert judged(wheel, bundle(spdx)).fix.commands == (f"{first} --predicate-type https://spdx.dev/Document/v2.3",)
    signed = judged(wheel, signed_file(statement(digest))).fix.commands[0]
    assert signed.startswith("python -m sigstore verify identity --bundle ")
    assert f"--cert-identity {WORKFLOW} --cert-oidc-issuer {GITHUB} " in signed
    (wheel.parent / f"{NAME}.sigstore.json").unlink()
    pypis = judged(wheel, pypi(statement(digest)), ".publish.attestation").fix.commands
    assert pypis == (f"pypi-attestations verify attestation --identity {WORKFLOW} '{wheel}'",)


def test_what_a_person_signed_is_not_checked_by_gh_whatever_repository_it_claims(wheel: Path) -> None:
    made = bundle(statement(digest_of(wheel)))
    signer = certificate("somebody@example.org", "", issuer="https://accounts.google.com", kind=0x81)
    made["verificationMaterial"]["certificate"]["rawBytes"] = encoded(signer)
    finding = judged(wheel, made)

    assert "signed, it says, by somebody@example.org" in finding.evidence
    assert [command.split()[2] for command in finding.fix.commands] == ["sigstore"]
    assert (
        "--cert-identity somebody@example.org --cert-oidc-issuer https://accounts.google.com" in finding.fix.commands[0]
    )


def test_one_attestation_may_name_many_wheels_and_one_file_may_hold_many_attestations(wheel: Path) -> None:
    digest = digest_of(wheel)
    others = [{"name": f"other-{number}.whl", "digest": {"sha256": OTHER}} for number in range(20)]
    many = statement(digest, subject=[*others, {"name": f"dist/{NAME}", "digest": {"sha256": digest.upper()}}])
    lines = [bundle(statement(OTHER, "other.whl")), bundle(statement(digest))]

    assert judged(wheel, bundle(many)).rule == "attestation-not-checked"
    assert judged(wheel, "\n".join(map(json.dumps, lines)).encode()).rule == "attestation-not-checked"


def test_a_second_attestation_does_not_outweigh_one_that_names_the_wheel_with_another_digest(wheel: Path) -> None:
    lines = [bundle(statement(digest_of(wheel))), bundle(statement(OTHER))]

    assert judged(wheel, "\n".join(map(json.dumps, lines)).encode()).rule == "attestation-other-wheel"


def test_what_gh_downloads_is_found_by_the_digest_in_its_name(wheel: Path) -> None:
    (wheel.parent / f"sha256:{OTHER}.jsonl").write_text(json.dumps(bundle(statement(OTHER))))
    assert judge_attestations(wheel) == ()

    (wheel.parent / f"sha256:{digest_of(wheel)}.jsonl").write_text(json.dumps(bundle(statement(digest_of(wheel)))))
    (finding,) = judge_attestations(wheel)
    assert finding.rule == "attestation-not-checked"


def test_an_unknown_type_of_statement_is_told_as_such(wheel: Path) -> None:
    finding = judged(wheel, bundle(statement(digest_of(wheel), predicateType="https://example.org/own/v1")))

    assert "of a type that dsdoctor does not know (https://example.org/own/v1)" in finding.title


def test_the_repository_of_the_certificate_goes_before_the_one_that_the_statement_claims(wheel: Path) -> None:
    made = bundle(statement(digest_of(wheel)))
    made["verificationMaterial"]["certificate"]["rawBytes"] = encoded(
        certificate(repository="https://github.com/real/one")
    )
    finding = judged(wheel, made)

    assert "--repo real/one " in finding.fix.commands[0]
    assert {"for the repository https://github.com/real/one", f"built, it says, from {REPOSITORY}"} < set(
        finding.evidence
    )


@pytest.mark.parametrize("name", ["--repo x", "$(id)", "x;id", "\x1b[31m", "../../etc", "a/b'c", "-a/b"])
def test_a_hostile_name_never_reaches_a_command(wheel: Path, name: str) -> None:
    evil = statement(digest_of(wheel), predicateType=f"-{name}")
    evil["predicate"]["buildDefinition"]["externalParameters"]["workflow"]["repository"] = f"https://github.com/{name}"
    made = bundle(evil)
    made["verificationMaterial"]["certificate"]["rawBytes"] = encoded(
        certificate(f"-{name}", f"https://github.com/{name}")
    )

    finding = judged(wheel, made)

    assert finding.rule == "attestation-not-checked"
    assert finding.fix.commands == ()
    assert all(line.isprintable() for line in (finding.title, *finding.evidence))


DEEP = b"[" * 100_000 + b"]" * 100_000
BAD: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"\x00\xff\x1f\x8b",
    "no object": b"[1, 2]",
    "another document": b'{"dsdoctor": 1}',
    "deep": DEEP,
    "deep inside": json.dumps(bundle(statement(OTHER)))
    .encode()
    .replace(b'{"rawBytes"', b'{"x":' + DEEP + b',"rawBytes"'),
    "half": json.dumps(bundle(statement(OTHER))).encode()[:-40],
    "too large": b" " * (LARGEST + 1),
    "too many lines": b"{}\n" * (MOST + 1),
    "no payload": json.dumps({"dsseEnvelope": {"payloadType": "application/vnd.in-toto+json"}}).encode(),
    "no base64": json.dumps({"dsseEnvelope": {"payload": "%%%"}}).encode(),
    "no statement": json.dumps(bundle({"_type": "https://example.org"})).encode(),
    "no digest": json.dumps(bundle(statement(OTHER, subject=[{"name": NAME}]))).encode(),
    "digests of other kinds": json.dumps(bundle(statement(OTHER, subject=[{"digest": {"sha256": [[1]]}}]))).encode(),
    "another algorithm": json.dumps({"messageSignature": {"messageDigest": {"algorithm": "SHA1"}}}).encode(),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_as_an_attestation_is_one_warning(wheel: Path, case: str) -> None:
    finding = judged(wheel, BAD[case])

    assert (finding.rule, finding.severity) == ("attestation-unreadable", Severity.WARNING)


def test_what_is_no_file_is_not_waited_for(wheel: Path) -> None:
    os.mkfifo(wheel.with_name(f"{NAME}.sigstore.json"))
    wheel.with_name(f"{NAME}.provenance").mkdir()
    wheel.with_name(f"{NAME}.jsonl").symlink_to("/nowhere")

    assert [finding.rule for finding in judge_attestations(wheel)] == ["attestation-unreadable"] * 3


WHOLE = json.dumps(bundle(statement(OTHER))).encode()
VALUES: tuple[Any, ...] = (None, 7, "text", "", [], [{}], {}, {"sha256": 7}, encoded(b"{}"))
REFUSED = {"attestation-other-wheel", "attestation-unreadable"}


def places(document: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of a document, inside its payload too."""
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [way, *(place for key, value in inner for place in places(value, (*way, key)))]


def with_value(document: Any, way: tuple[Any, ...], value: Any) -> Any:
    if not way:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[way[0]] = with_value(document[way[0]], way[1:], value)
    return copy


@pytest.mark.slow
@each_form
def test_a_value_of_another_kind_anywhere_never_crashes_and_never_attests(wheel: Path, ending: str) -> None:
    inside, form = statement(OTHER), FORMS[ending]
    whole = form(inside)
    changed = [with_value(whole, way, value) for way in places(whole) for value in VALUES]
    if form is not signed_file:
        changed += [form(with_value(inside, way, value)) for way in places(inside) for value in VALUES]

    assert len(changed) > 100
    assert [one for one in changed if judged(wheel, json.dumps(one).encode()).rule not in REFUSED] == []


def test_a_changed_byte_never_crashes_and_never_attests(wheel: Path) -> None:
    changed = [WHOLE[:at] + bytes([at % 256]) + WHOLE[at + 1 :] for at in range(0, len(WHOLE), 29)]

    assert [one for one in changed if judged(wheel, one).rule not in REFUSED] == []


def test_a_certificate_names_its_workflow_its_issuer_and_its_repository() -> None:
    assert signer_of(certificate()) == Signer(identity=WORKFLOW, issuer=GITHUB, repository=REPOSITORY)


def test_a_damaged_certificate_names_somebody_printable_or_nobody() -> None:
    data = certificate()
    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + b"\x84" + data[at + 1 :], data[:at] + b"\x1b" + data[at + 1 :]):
            found = signer_of(damaged)
            assert all(text is None or text.isprintable() for text in (found.identity, found.issuer, found.repository))
