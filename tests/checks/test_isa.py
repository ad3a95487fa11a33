"""Compiler flags against real processors' /proc/cpuinfo, and wheels that are refused for one instruction."""

import json
import subprocess
from pathlib import Path

import pytest

from dsdoctor.core.architectures import FEATURES, instructions_of, lacking_instructions, says_nothing
from tests.builder.test_verify import H100_TORCH_2_14, rules, with_gpu_code
from tests.builder.test_wheel import contents, wheel
from tests.cli.runner import run

CORTEX_A72 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
N1 = f"{CORTEX_A72} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp ssbs"
A64FX = f"{CORTEX_A72} atomics fphp asimdhp asimdrdm fcma dcpop sve"
V1 = f"{N1} jscvt fcma sha3 sm3 sm4 sha512 sve asimdfhm dit uscat ilrcpc flagm paca pacg svei8mm svebf16 i8mm bf16"
V2 = f"{V1} dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint sb dgh bti"


@pytest.mark.parametrize(
    ("flag", "features", "lost"),
    [
        ("-march=armv8-a", CORTEX_A72, ()),
        ("-march=armv8.2-a", CORTEX_A72, ("+lse", "+rdma")),
        ("-march=armv8.2-a", N1, ()),
        ("-march=armv8.2-a+crypto+fp16+rcpc+dotprod+ssbs+profile", N1, ()),
        ("-march=armv8.2-a+crypto+fp16+rcpc+dotprod+ssbs+profile", A64FX, ("+rcpc", "+dotprod")),
        ("-march=armv8.2-a+sve", N1, ("+sve",)),
        ("-march=armv8.2-a+sve", A64FX, ()),
        ("-march=armv8.2-a+sve", V1, ()),
        ("-march=armv9-a", V1, ("+sve2",)),
        ("-march=armv9-a", V2, ()),
        ("-march=armv9-a+nosve", f"{N1} fcma ilrcpc", ()),
        ("-march=armv8.2-a+sve2-bitperm", V1, ("+sve2",)),
        ("-mcpu=neoverse-v1", N1, ("+fcma", "+rcpc2", "+sve", "+bf16", "+i8mm")),
        ("-mcpu=neoverse-v2", V2, ()),
        ("-mcpu=a64fx", A64FX, ()),
    ],
)
def test_arm_code_needs_what_its_processor_lacks(flag: str, features: str, lost: tuple[str, ...]) -> None:
    assert lacking_instructions([flag, "-mlittle-endian"], frozenset(features.split())) == lost
    assert not says_nothing([flag])


def test_what_native_code_uses_is_what_the_processor_has() -> None:
    features = frozenset(N1.split())

    assert instructions_of(features) == ("+simd", "+lse", "+rdma", "+rcpc", "+dotprod", "+fp16")
    assert len(set(FEATURES.values())) == len(FEATURES)


def snapshot(folder: Path, *, flags: str, **cpuinfo: str) -> Path:
    """The H100 machine with another processor."""
    told = json.loads(H100_TORCH_2_14.read_bytes())
    asked = {question: question.split("\x1f") for question in told["answers"]}
    for question, parts in asked.items():
        if parts[:2] == ["search", "/proc/cpuinfo"]:
            told["answers"][question] = flags if "flags" in parts[2] else cpuinfo.get("model", "")
    told["answers"]["search\x1f/proc/cpuinfo\x1f^CPU (?:implementer|part)\\s*:.*$"] = cpuinfo.get("part", "")
    file = folder / "machine.json"
    file.write_text(json.dumps(told))
    return file


@pytest.mark.parametrize("debug", [("-g",), ("-g0", "-frecord-gcc-switches")])
def test_x86_64_v3_code_is_refused_on_a_processor_without_avx2(debug: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "x.c").write_text("int f(int x) { return x + 1; }")
    gcc = ["gcc", "-shared", "-fPIC", "-march=x86-64-v3", *debug, "-o", "x.so", "x.c"]
    subprocess.run(gcc, cwd=tmp_path, check=True)
    path = wheel(tmp_path, contents(with_gpu_code(tmp_path / "x.so")))
    old = snapshot(tmp_path, flags="flags\t: pni ssse3 sse4_1 sse4_2 popcnt avx", model="model name : Xeon E5-2670")

    assert rules(path, H100_TORCH_2_14) == (0, set())
    assert rules(path, old) == (1, {"cpu-isa-illegal-instruction"})
    assert "use -mavx2, -mfma" in run("wheel", "verify", str(path), "--machine", str(old)).stdout


def test_sve_code_is_refused_on_a_neoverse_n1_by_name(tmp_path: Path) -> None:
    told = b"GNU C++17 12.2.0 -march=armv8.2-a+sve -mlittle-endian -mabi=lp64 -g0 -O3 -fPIC\0"
    (tmp_path / "told").write_bytes(told)
    (tmp_path / "x.c").write_text("int f(int x) { return x + 1; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "x.so", "x.c"], cwd=tmp_path, check=True)
    subprocess.run(["objcopy", "--add-section", ".GCC.command.line=told", "x.so"], cwd=tmp_path, check=True)
    path = wheel(tmp_path, contents(with_gpu_code(tmp_path / "x.so")))
    part = "CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"

    shown = run(
        "wheel", "verify", str(path), "--machine", str(snapshot(tmp_path, flags=f"Features : {N1}", part=part))
    ).stdout

    assert "ops use +sve" in shown
    assert "    processor: Neoverse-N1\n    -march=armv8.2-a+sve\n" in shown
    assert rules(path, snapshot(tmp_path, flags=f"Features : {V1}", part=part)) == (0, set())
