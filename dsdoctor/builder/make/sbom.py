"""A wheel's bill of materials, CycloneDX 1.6, from its manifest, the machine and the toolkit's parts. Pure.

It is written to ``<dist-info>/sboms`` (PEP 770). No clock is read, and no path of the machine gets into it: the same in, the same
bytes out.
"""

import re
import uuid
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

import msgspec

from dsdoctor.builder.make.manifest import Manifest, ManifestOp
from dsdoctor.builder.plan.compiler import version_of
from dsdoctor.builder.source.fetch import NEWEST
from dsdoctor.builder.toolkit.kept import NVIDIA as NVIDIA_ARCHIVES
from dsdoctor.builder.toolkit.kept import PYPI, Part
from dsdoctor.core.build_models import BuildPlan
from dsdoctor.core.machine import Machine
from dsdoctor.core.release import __version__

SBOM = "sboms/dsdoctor.cdx.json"
"""Its path in a wheel's dist-info."""

Component = dict[str, Any]
APACHE = [{"license": {"id": "Apache-2.0"}}]
NVIDIA = {"name": "NVIDIA Corporation"}
BUILD_PACKAGES = ("setuptools", "wheel")
EVERYWHERE = re.compile(
    r"(?:lib(?:c|m|dl|rt|util|pthread|gcc_s|stdc\+\+)|ld-linux[\w-]*)\.so\.\d+"  # glibc, and what every C++ program links
    r"|lib(?:torch\w*|c10\w*|shm)\.so[\d.]*"  # torch, which is a component of its own
)
"""Libraries that are not listed. CUDA's are listed, although torch depends on the packages that hold them."""


def bill_of_materials(manifest: Manifest, machine: Machine, parts: tuple[Part, ...], *, epoch: str | None) -> bytes:
    """The document. ``parts`` are the packages that the toolkit is made of, ``epoch`` is SOURCE_DATE_EPOCH.

    In it are: the wheel with each op's file, the DeepSpeed source, torch, the CUDA toolkit and its parts, the libraries of the
    system that the ops link, and, as excluded from the wheel, the tools that made it.
    """
    files = [_file(op) for op in manifest.ops]
    wheel = _wheel(manifest, files)
    materials = [*_materials(manifest, parts), *_tools(manifest.plan, machine, parts)]
    libraries = [_library(name) for name in sorted({name for op in manifest.ops for name in listed(op)})]
    components = [*materials, *libraries]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": _metadata(wheel, epoch),
        "components": components,
        "dependencies": [
            {"ref": wheel["bom-ref"], "dependsOn": [part["bom-ref"] for part in (*materials, *files)]},
            *({"ref": _file_ref(op), "dependsOn": [_library_ref(name) for name in listed(op)]} for op in manifest.ops),
            *({"ref": component["bom-ref"]} for component in components),
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, msgspec.json.encode(document).decode())
    return msgspec.json.format(msgspec.json.encode({**document, "serialNumber": f"urn:uuid:{serial}"}), indent=1)


def _metadata(wheel: Component, epoch: str | None) -> dict[str, Any]:
    written = timestamp(epoch)
    dsdoctor = _component("application", "dsdoctor", __version__, purl=purl("dsdoctor", __version__))
    return {
        **({"timestamp": written} if written else {}),
        "lifecycles": [{"phase": "build"}],
        "tools": {"components": [dsdoctor]},
        "component": wheel,
    }


def timestamp(epoch: str | None) -> str | None:
    """SOURCE_DATE_EPOCH as CycloneDX writes a time; None for none and for one that is malformed.

    >>> timestamp("1700000000"), timestamp("soon"), timestamp(None)
    ('2023-11-14T22:13:20+00:00', None, None)
    """
    if epoch is None or not re.fullmatch(r"\d{1,11}", epoch, re.ASCII):
        return None
    return datetime.fromtimestamp(int(epoch), tz=timezone.utc).isoformat()


def purl(name: str, version: str) -> str:
    """The package URL of a Python package.

    >>> purl("torch", "2.14.1+cu130")
    'pkg:pypi/torch@2.14.1%2Bcu130'
    """
    return f"pkg:pypi/{name}@{quote(version, safe='')}"


def _component(kind: str, name: str, version: str | None = None, **more: Any) -> Component:
    """A component; what is None is left out. Its reference is ``ref``, else its package URL, else its kind, name and version."""
    reference = more.pop("ref", more.get("purl") or ":".join(filter(None, (kind, name, version))))
    facts = {"type": kind, "bom-ref": reference, "name": name, "version": version, **more}
    return {key: value for key, value in facts.items() if value is not None}


def _properties(**values: str | None) -> list[dict[str, str]] | None:
    found = [{"name": f"dsdoctor:{name}", "value": value} for name, value in values.items() if value]
    return found or None


def _wheel(manifest: Manifest, files: list[Component]) -> Component:
    """The wheel itself."""
    # it has no digest here: this document is part of the wheel
    return _component(
        "library",
        manifest.name,
        manifest.version,
        ref="wheel",
        purl=purl(manifest.name, manifest.version),
        licenses=APACHE,
        components=files,
        properties=_properties(
            accelerator=manifest.accelerator, python=manifest.python, platform=manifest.platform, glibc=manifest.glibc
        ),
    )


def _file(op: ManifestOp) -> Component:
    return _component(
        "file",
        op.file,
        ref=_file_ref(op),
        hashes=[{"alg": "SHA-256", "content": op.sha256}],
        properties=_properties(op=op.op, sm_arch=" ".join(op.sm_arch or ())),
    )


def _file_ref(op: ManifestOp) -> str:
    return f"file:{op.file}"


def listed(op: ManifestOp) -> tuple[str, ...]:
    """The libraries that an op links and that are listed."""
    return tuple(sorted(name for name in set(op.needed) if not EVERYWHERE.fullmatch(name)))


def _library(soname: str) -> Component:
    """A library of the system; which package and version it comes from differs from system to system."""
    return _component("library", soname, ref=_library_ref(soname), scope="required")


def _library_ref(soname: str) -> str:
    return f"soname:{soname}"


def _materials(manifest: Manifest, parts: Iterable[Part]) -> Iterator[Component]:
    """What the ops contain, if only as headers: the source, torch, the toolkit and its packages."""
    yield _source(manifest)
    yield _package("torch", manifest.torch, scope="required")
    if manifest.plan.toolkit is not None:
        release = str(manifest.plan.toolkit.release)
        yield _component("framework", "cuda-toolkit", release, manufacturer=NVIDIA, scope="required")
    for part in parts:
        yield _component(
            "library",
            part.name,
            part.version,
            purl=purl_of(part),
            scope="excluded" if is_tool(part) else "required",
            manufacturer=NVIDIA,
            hashes=[{"alg": "SHA-256", "content": part.sha256}] if part.sha256 else None,
        )


def purl_of(part: Part) -> str:
    """The package URL of a part of a toolkit.

    >>> purl_of(Part(name="nvidia-cuda-toolkit", version="12.4.131~12.4.1-2", origin="debian"))
    'pkg:deb/debian/nvidia-cuda-toolkit@12.4.131~12.4.1-2'
    >>> purl_of(Part(name="cuda_nvcc", version="12.8.93", origin="nvidia", sha256="ab"))
    'pkg:generic/nvidia/cuda_nvcc@12.8.93?checksum=sha256:ab'
    """
    if part.origin == PYPI:
        return purl(part.name, part.version)
    version = quote(part.version, safe="~")
    if part.origin == NVIDIA_ARCHIVES:
        return f"pkg:generic/nvidia/{part.name}@{version}" + (f"?checksum=sha256:{part.sha256}" if part.sha256 else "")
    return f"pkg:deb/{part.origin}/{part.name}@{version}"


def is_tool(part: Part) -> bool:
    """Whether a part of a toolkit only compiles: nvcc and its back end, or a distribution's package, of which no more is taken.

    >>> is_tool(Part(name="nvidia-cuda-nvcc-cu12", version="1")), is_tool(Part(name="nvidia-nvjitlink", version="1"))
    (True, False)
    """
    if part.origin not in {PYPI, NVIDIA_ARCHIVES}:
        return True
    return re.fullmatch(r"nvidia-(cuda-nvcc|nvvm)(-cu\d+)?|cuda_nvcc|libnvvm", part.name) is not None


def _package(name: str, version: str, **more: Any) -> Component:
    return _component("library", name, version, purl=purl(name, version), **more)


def _source(manifest: Manifest) -> Component:
    """The DeepSpeed source: its package or repository; for a local folder only the digest of its files and its commit."""
    asked, version, commit = manifest.source, manifest.plan.source_version, manifest.source_commit
    address = vcs_url(asked)
    where = None
    if address is not None:
        where = f"pkg:generic/deepspeed@{quote(version, safe='')}?vcs_url={quote(f'git+{address}', safe=':/')}"
        where += quote(f"@{commit}") if commit else ""
    elif asked == NEWEST or re.fullmatch(r"\d+(\.\w+)*", asked):
        where = f"{purl('deepspeed', version)}?file_name=deepspeed-{quote(version, safe='')}.tar.gz"
    return _component(
        "library",
        "deepspeed",
        version,
        ref="source",
        purl=where,
        licenses=APACHE,
        scope="required",
        description="the source that was built",
        pedigree={"commits": [{"uid": commit}]} if commit else None,
        externalReferences=[{"type": "vcs", "url": address}] if address else None,
        properties=_properties(tree_sha256=manifest.source_digest),
    )


def vcs_url(asked: str) -> str | None:
    """The address of a repository that others can reach, without user, password and branch.

    >>> vcs_url("git+https://github.com/deepspeedai/DeepSpeed.git@master"), vcs_url("git+file:///home/me/DeepSpeed")
    ('https://github.com/deepspeedai/DeepSpeed.git', None)
    """
    match = re.match(r"git\+((?:https?|ssh|git)://[^/@\s]+/[^@?#\s]+)", asked)
    return match[1] if match else None


def _tools(plan: BuildPlan, machine: Machine, parts: Iterable[Part]) -> Iterator[Component]:
    """The tools that made the wheel and are not in it."""
    cc, cxx = plan.env.get("CC"), plan.env.get("CXX")
    compiler = next((known for known in machine.compilers if cxx == known.path or cc == known.c_path), None)
    if compiler is not None:
        yield _component(
            "application", compiler.kind, version_of(compiler), scope="excluded", description="C++ compiler"
        )
    if any(op.device_code for op in plan.ops) and not any(is_tool(part) for part in parts):
        yield _component("application", "nvcc", _nvcc_version(plan, machine), manufacturer=NVIDIA, scope="excluded")
    for name in BUILD_PACKAGES:
        version = machine.package(name)
        if version is not None:
            yield _package(name, version, scope="excluded")


def _nvcc_version(plan: BuildPlan, machine: Machine) -> str | None:
    """The version of the plan's nvcc, which may be a layer of an assembled toolkit."""
    if plan.toolkit is None:
        return None
    folders = {f"{plan.toolkit.root}/bin", *(layer.tools for layer in plan.toolkit.layers)}
    versions = (known.version for known in machine.toolkits if known.nvcc and known.nvcc.rpartition("/")[0] in folders)
    return next(versions, str(plan.toolkit.release))
