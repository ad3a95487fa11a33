"""What the attestations beside a wheel state, against the wheel -> findings. That one is genuine is never said: that takes the
signature, Sigstore's certificates and its log, which `gh` and `sigstore` check."""

import re
from pathlib import Path

from dsdoctor.builder.wheel.attestation import (
    Statement,
    Unreadable,
    attestation_files,
    may_have_attestation,
    read_attestation,
)
from dsdoctor.builder.wheel.read import hex_of
from dsdoctor.core.finding import Finding, Step, step
from dsdoctor.core.text import and_more

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
