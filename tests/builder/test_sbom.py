"""Bills of materials against CycloneDX's own schema, and what stands in them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.builder.make.manifest import Manifest, OpProof, describe_wheel
from dsdoctor.builder.make.sbom import bill_of_materials
from dsdoctor.builder.toolkit.kept import KeptPart, Part, toolkit_parts, write_mark
from dsdoctor.builder.wheel.shared_object import ElfInfo
from dsdoctor.core.build_models import BuildPlan, Layer, OpPlan, Source, ToolkitPlan
from dsdoctor.core.machine import Cuda, Machine
from tests.conftest import PYTHON, machine, toolkit

HERE = machine(
    toolkits=(toolkit(Cuda(13, 0)),),
    python=replace(PYTHON, packages={**PYTHON.packages}),
)
SOURCE = Source(
    folder="/home/user/.cache/x/source", asked="0.19.8", version="0.19.8", digest="d" * 64, accelerator="cuda", ops=()
)
EVERYWHERE = ("libtorch_cpu.so", "libc10.so", "libstdc++.so.6", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2")
PARTS = (Part(name="nvidia-curand", version="10.4.0.35"), Part(name="nvidia-cuda-nvcc", version="13.0.88"))


def op(name: str, *, device_code: bool = False) -> OpPlan:
    return OpPlan(op=name, variable=name.upper(), module=f"deepspeed.ops.{name}", sources=(), device_code=device_code)


def proof(name: str, *needed: str) -> OpProof:
    elf_info = ElfInfo(sm_arch=("90_real",), glibc="2.34", glibcxx=None, cpu_flags=(), needed=needed + EVERYWHERE)
    return OpProof(op=name, file=f"deepspeed/ops/{name}.so", sha256="a" * 64, elf_info=elf_info, loads=True)


PLAN = BuildPlan(
    python="/home/user/venv/bin/python",
    source="0.19.8",
    source_version="0.19.8",
    accelerator="cuda",
    ops=(op("async_io"), op("random_ltd", device_code=True)),
    left_out=(),
    architectures=("9.0",),
    toolkit=ToolkitPlan(root="/usr/local/cuda-13.0", release=Cuda(13, 0)),
    headers=None,
    jobs=2,
    memory=4 << 30,
    local_version="cu13.0.torch2.14",
    env={"CC": "/usr/bin/gcc", "CXX": "/usr/bin/g++"},
    prepend={},
    unset=(),
    disk=0,
    choices=(),
    findings=(),
)
PROOFS = (proof("async_io", "libaio.so.1", "libgomp.so.1"), proof("random_ltd", "libcurand.so.10", "libcudart.so.13"))
MANIFEST = describe_wheel(PLAN, SOURCE, HERE, PROOFS)


def bill(
    manifest: Manifest = MANIFEST, here: Machine = HERE, parts: tuple[Part, ...] = (), epoch: str | None = None
) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(bill_of_materials(manifest, here, parts, epoch=epoch))
    return document


def of_source(asked: str, commit: str | None = None) -> dict[str, Any]:
    document = bill(replace(MANIFEST, source=asked, source_commit=commit))
    return next(part for part in document["components"] if part["bom-ref"] == "source")


def every_component(document: dict[str, Any]) -> list[dict[str, Any]]:
    wheel = document["metadata"]["component"]
    return [wheel, *wheel["components"], *document["components"]]


@pytest.mark.parametrize(
    "document",
    [
        bill(),
        bill(parts=PARTS, epoch="1700000000"),
        bill(replace(MANIFEST, source="git+https://h/o/DeepSpeed.git@main", source_commit="c" * 40)),
        bill(replace(MANIFEST, ops=(), plan=replace(PLAN, toolkit=None, env={}, ops=())), machine(python=None)),
    ],
    ids=["system-toolkit", "parts", "git", "little"],
)
@pytest.mark.slow
def test_the_schema_accepts_it_and_every_package_url_reads_back(document: dict[str, Any]) -> None:
    # imported here: they take a second, and only CI and who works on this need them
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from packageurl import PackageURL

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document)) is None
    for component in every_component(document):
        if "purl" in component and component["purl"].startswith("pkg:pypi"):
            url = PackageURL.from_string(component["purl"])
            assert (url.name, url.version) == (component["name"], component["version"])
            assert url.to_string() == component["purl"]


def test_what_went_into_the_wheel_is_in_it() -> None:
    document = bill(parts=PARTS)

    listed = {(part["name"], part.get("version"), part.get("scope")) for part in document["components"]}
    assert listed == {
        ("deepspeed", "0.19.8", "required"),
        ("torch", "2.14.1+cu130", "required"),
        ("cuda-toolkit", "13.0", "required"),
        ("nvidia-curand", "10.4.0.35", "required"),
        ("nvidia-cuda-nvcc", "13.0.88", "excluded"),
        ("gcc", "12.2.0", "excluded"),
        ("setuptools", "84.2.1", "excluded"),
        ("wheel", "0.48.0", "excluded"),
        *((soname, None, "required") for soname in ("libaio.so.1", "libgomp.so.1")),
        *((soname, None, "required") for soname in ("libcudart.so.13", "libcurand.so.10")),
    }
    wheel = document["metadata"]["component"]
    assert (wheel["version"], "hashes" in wheel) == ("0.19.8+cu13.0.torch2.14", False)
    assert [part["hashes"] for part in wheel["components"]] == [[{"alg": "SHA-256", "content": "a" * 64}]] * 2


def test_the_nvcc_of_a_system_toolkit_or_of_an_assembled_ones_layer_is_named() -> None:
    layer = Layer(include=(), libraries=(), tools="/usr/local/cuda-13.0/bin")
    made = ToolkitPlan(root="/cache/home", release=Cuda(13, 0), assemble=True, layers=(layer,))
    for chosen in (PLAN.toolkit, made):
        document = bill(replace(MANIFEST, plan=replace(PLAN, toolkit=chosen)))

        assert ("nvcc", "13.0.88", "excluded") in {
            (part["name"], part.get("version"), part.get("scope")) for part in document["components"]
        }


def test_the_wheel_depends_on_all_and_each_op_on_what_it_links() -> None:
    document = bill(parts=PARTS)

    graph = {part["ref"]: set(part.get("dependsOn", ())) for part in document["dependencies"]}
    assert graph["file:deepspeed/ops/async_io.so"] == {"soname:libaio.so.1", "soname:libgomp.so.1"}
    reached = {"wheel"}
    while more := {below for ref in reached for below in graph[ref]} - reached:
        reached |= more
    refs = [part["bom-ref"] for part in every_component(document)]
    assert (len(refs), reached) == (len(set(refs)), set(refs))


def test_it_is_the_same_each_time_and_another_for_another_wheel() -> None:
    other = describe_wheel(PLAN, SOURCE, HERE, (replace(PROOFS[0], sha256="b" * 64),))

    assert bill_of_materials(MANIFEST, HERE, PARTS, epoch=None) == bill_of_materials(MANIFEST, HERE, PARTS, epoch=None)
    assert bill()["serialNumber"] != bill(other)["serialNumber"]
    assert "timestamp" not in bill()["metadata"]
    assert bill(epoch="0")["metadata"]["timestamp"] == "1970-01-01T00:00:00+00:00"


def test_it_names_no_folder_of_the_machine() -> None:
    text = json.dumps(bill(replace(MANIFEST, source="/home/user/DeepSpeed", source_commit="c" * 40)))

    assert not any(word in text for word in ("/home", "/usr", "/cache", "user", "~"))


def test_a_source_is_told_by_where_others_find_it() -> None:
    git = of_source("git+https://github.com/o/DeepSpeed.git@main", commit="c" * 40)

    assert of_source("newest")["purl"] == "pkg:pypi/deepspeed@0.19.8?file_name=deepspeed-0.19.8.tar.gz"
    assert git["purl"] == f"pkg:generic/deepspeed@0.19.8?vcs_url=git%2Bhttps://github.com/o/DeepSpeed.git%40{'c' * 40}"
    assert git["pedigree"] == {"commits": [{"uid": "c" * 40}]}
    assert git["externalReferences"] == [{"type": "vcs", "url": "https://github.com/o/DeepSpeed.git"}]
    assert "purl" not in of_source("git+file:///home/user/DeepSpeed")
    assert "purl" not in of_source("./deepspeed-0.19.8.tar.gz")


def test_the_packages_of_a_toolkit_are_found_by_where_its_links_lead(tmp_path: Path) -> None:
    site, home = tmp_path / "site-packages", tmp_path / "home"
    for name, listed in {"nvidia_curand-10.4.0.35": "cu13", "nvidia_curand_cu12-10.3.1": "curand"}.items():
        (site / f"{name}.dist-info").mkdir(parents=True)
        (site / f"{name}.dist-info" / "RECORD").write_text(f"nvidia/{listed}/include/curand_kernel.h,sha256=x,1\n")
    (site / "nvidia/cu13/include").mkdir(parents=True)
    (site / "nvidia/cu13/include/curand_kernel.h").touch()
    (home / "include").mkdir(parents=True)
    (home / "include/curand_kernel.h").symlink_to(site / "nvidia/cu13/include/curand_kernel.h")
    (home / "include/nccl.h").touch()

    assert toolkit_parts(home) == (Part(name="nvidia-curand", version="10.4.0.35"),)
    assert toolkit_parts(tmp_path / "none") == ()


def test_what_a_toolkit_was_fetched_from_is_listed_with_its_digest(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    write_mark(
        home,
        [
            KeptPart(origin="nvidia", name="cuda_cudart", version="12.8.90", sha256="a" * 64),
            KeptPart(origin="debian", name="nvidia-cuda-toolkit", version="12.4.131~12.4.1-2", sha256="b" * 64),
            KeptPart(origin="pypi", name="cuda-toolkit", version="12.4.1", sha256="c" * 64),
        ],
    )

    document = json.loads(bill_of_materials(MANIFEST, HERE, toolkit_parts(home), epoch=None))
    found = {component["name"]: component for component in document["components"]}

    assert found["cuda_cudart"]["purl"] == f"pkg:generic/nvidia/cuda_cudart@12.8.90?checksum=sha256:{'a' * 64}"
    assert found["nvidia-cuda-toolkit"]["hashes"] == [{"alg": "SHA-256", "content": "b" * 64}]
    assert [found[name]["scope"] for name in ("cuda_cudart", "nvidia-cuda-toolkit")] == ["required", "excluded"]
