"""The processor that host code is for, and what a shared object without debug information still tells of it."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from dsdoctor.builder.make.commands import Command, FlagSettings, edited
from dsdoctor.builder.plan.choices import choose_architectures
from dsdoctor.builder.plan.compiler import LEVELS, choose_processor, flags_of
from dsdoctor.builder.wheel.shared_object import read_elf
from dsdoctor.core.architectures import FEATURES, lacking_instructions
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Severity
from dsdoctor.core.machine import Compiler, Machine, Node, System
from dsdoctor.core.requests import BuildRequest
from dsdoctor.rules import book
from tests.cli.runner import run
from tests.conftest import GCC, TORCH, machine
from tests.machines.make import HERE


def of(features: str, name: str = "n", architecture: str = "x86_64", *capabilities: str, model: str = "") -> Node:
    flags = frozenset(features.split())
    system = System(architecture=architecture, os="Debian", cpu_flags=flags, cpu_model=model or None)
    return Node(name=name, system=system, capabilities=capabilities)


V2 = "pni ssse3 sse4_1 sse4_2 popcnt"
V3 = f"{V2} avx avx2 fma f16c bmi1 bmi2 abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
N1 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
V1 = f"{N1} jscvt fcma sve asimdfhm uscat ilrcpc flagm svei8mm svebf16 i8mm bf16"
ICELAKE, EPYC = machine(system=of(V4).system), machine(system=of(V3).system)
ARM = machine(system=of(N1, "n", "aarch64").system)


def chosen(here: Machine, *nodes: Node, cpu: str | None = None, compiler: Compiler = GCC) -> tuple[str, str, list[str]]:
    level, choice, findings = choose_processor(here, BuildRequest(cpu=cpu, nodes=nodes), compiler)
    assert choice.value == level
    return level, choice.because, [finding.rule for finding in findings]


@pytest.mark.parametrize(
    ("here", "asked", "level"),
    [
        (ICELAKE, None, "native"),
        (ICELAKE, "native", "native"),
        (ICELAKE, "v3", "x86-64-v3"),
        (ICELAKE, "x86-64-v4", "x86-64-v4"),
        (ARM, None, "native"),
        (ARM, "armv8.2-a", "armv8.2-a"),
    ],
)
def test_a_level_of_this_architecture_is_taken_by_its_short_name_too(
    here: Machine, asked: str | None, level: str
) -> None:
    name, _, rules = chosen(here, cpu=asked)

    assert (name, rules) == (level, [])
    assert bool(flags_of(name)) == (name != "native")


def test_a_level_that_is_none_and_one_of_another_architecture_are_refused() -> None:
    with pytest.raises(UsageError, match="--cpu 'haswell' is not a level"):
        chosen(ICELAKE, cpu="haswell")
    with pytest.raises(UsageError, match="--cpu x86-64-v3 is for x86_64, but this machine is aarch64") as error:
        chosen(ARM, cpu="v3")
    with pytest.raises(UsageError, match="--cpu armv8-a is for aarch64, but this machine is x86_64"):
        chosen(ICELAKE, cpu="armv8-a")
    assert error.value.hint == "on aarch64 use one of: native, armv8-a, armv8.2-a, armv8.2-a+sve, armv9-a"


def test_every_level_holds_those_before_it() -> None:
    for architecture in ("x86_64", "aarch64"):
        held = [
            {name for name in FEATURES if name in lacking_instructions(flags_of(level.name)[:1], frozenset())}
            for level in LEVELS
            if level.architecture == architecture
        ]

        assert all(less <= more for less, more in pairwise(held))


@pytest.mark.parametrize(
    ("here", "features", "level"),
    [
        (ICELAKE, (V4, V4), "x86-64-v4"),
        (ICELAKE, (V4, V3, V4), "x86-64-v3"),
        (EPYC, (V2,), "x86-64-v2"),
        (EPYC, ("fpu sse2",), "x86-64"),
        (ARM, (V1, N1), "armv8.2-a"),
        (ARM, (V1,), "armv8.2-a+sve"),
        (ARM, (f"{V1} sve2",), "armv9-a"),
        (ARM, ("fp asimd crc32 cpuid", N1), "armv8-a"),
    ],
)
def test_the_best_level_that_all_nodes_have_is_taken(here: Machine, features: tuple[str, ...], level: str) -> None:
    nodes = [of(told, f"n{number}", here.system.architecture) for number, told in enumerate(features)]

    name, because, _ = chosen(here, *nodes)

    assert name == level
    assert because.startswith(f"the best that {', '.join(node.name for node in nodes)} ")


def test_the_node_that_limits_the_level_is_named_with_what_it_lacks() -> None:
    _, because, _ = chosen(EPYC, of(V4, "new"), of(V3, "old", model="EPYC 7763"))

    assert because == (
        "the best that new, old support (--node); old (EPYC 7763) lacks -mavx512f, -mavx512bw, -mavx512cd and 2 more of x86-64-v4"
    )


def test_nodes_that_no_wheel_of_this_machine_can_be_for_are_refused() -> None:
    arm = of(N1, "arm", "aarch64")

    with pytest.raises(UsageError, match="x is x86_64, but arm is aarch64"):
        chosen(ICELAKE, of(V3, "x"), arm)
    with pytest.raises(UsageError, match="arm is aarch64, but this machine is x86_64"):
        chosen(ICELAKE, arm, cpu="v3")
    with pytest.raises(UsageError, match="the snapshot of x does not list its processor's instructions"):
        chosen(ICELAKE, of("", "x"))
    with pytest.raises(UsageError, match=r"x supports none of .* levels for ppc64le"):
        chosen(machine(system=of("altivec", "x", "ppc64le").system), of("altivec", "x", "ppc64le"))


def test_a_level_above_this_machine_is_said_and_one_that_a_node_lacks_is_an_error() -> None:
    assert chosen(EPYC, of(V4))[2] == ["cpu-above-this-machine"]
    assert chosen(EPYC, cpu="v4")[2] == ["cpu-above-this-machine"]
    assert chosen(ICELAKE, of(V4), of(V3), cpu="v4")[2] == ["cpu-not-on-node"]
    assert chosen(ICELAKE, of(V3), cpu="native")[2] == ["cpu-not-on-node"]
    assert chosen(EPYC, of(V4), cpu="native")[2] == []


def test_a_compiler_that_does_not_know_the_level_is_an_error() -> None:
    old = replace(GCC, version=(10, 2, 1))
    _, _, [finding] = choose_processor(ICELAKE, BuildRequest(cpu="v3"), old)

    assert finding == book.finding(
        "cpu-unknown-to-compiler",
        Severity.ERROR,
        evidence=[f"compiler: {old.path}"],
        compiler="gcc 10.2.1",
        level="x86-64-v3",
        oldest="gcc 11",
    )
    assert chosen(ICELAKE, cpu="x86-64", compiler=old)[2] == chosen(ICELAKE, compiler=old)[2] == []


def test_gpu_code_is_for_the_gpus_of_all_nodes() -> None:
    nodes = (of(V3, "a", "x86_64", "9.0", "8.0"), of(V3, "b", "x86_64", "10.0"), of(V3, "login"))
    here = machine(torch=replace(TORCH, capabilities=("7.5",)), variables={"TORCH_CUDA_ARCH_LIST": "7.0"})

    taken = choose_architectures(here, BuildRequest(nodes=nodes))

    assert (taken.entries, taken.asked) == (("8.0", "9.0", "10.0"), True)
    assert taken.because == (
        "the GPUs of the nodes: a 8.0 9.0, b 10.0, login none (--node); TORCH_CUDA_ARCH_LIST from your shell is ignored"
    )
    assert choose_architectures(here, BuildRequest(nodes=nodes, arch="9.0")).entries == ("9.0",)
    assert choose_architectures(replace(here, variables={}), BuildRequest(nodes=nodes[2:])).entries == TORCH.arch_list


def test_the_plan_command_reads_the_nodes_from_their_snapshots() -> None:
    nodes = [str(HERE / f"{name}.json") for name in ("several-toolkits", "one-toolkit")]
    done = run(
        "plan", "--machine", nodes[0], "--node", nodes[0], "--node", nodes[1], "--ops", "cpu_adam,fused_adam", "--json"
    )

    plan = json.loads(done.stdout)["plan"]
    assert (done.returncode, plan["processor"], plan["architectures"]) == (0, "x86-64-v3", ["8.0", "9.0"])


SOURCE = """
#if defined(__AVX512__)
extern "C" int simd() { return 512; }
#elif defined(__AVX256__)
extern "C" int simd() { return 256; }
#endif
"""


@pytest.mark.parametrize(
    ("processor", "debug_info", "simd"), [("native", False, 512), ("x86-64-v3", False, 256), ("x86-64-v3", True, 256)]
)
def test_an_op_is_compiled_for_the_level_and_still_tells_it(
    processor: str, debug_info: bool, simd: int, tmp_path: Path
) -> None:
    (tmp_path / "op.cpp").write_text(SOURCE)
    words = ("g++", "-O1", "-g", "-march=native", "-D__AVX512__", "-fPIC", "-c", "op.cpp", "-o", "op.o")
    given = Command(argv=words, source="op.cpp", output="op.o")

    made = edited(given, FlagSettings(host=flags_of(processor), debug_info=debug_info))

    subprocess.run(made.argv, cwd=tmp_path, check=True)
    subprocess.run(["g++", "-shared", "-o", "op.so", "op.o"], cwd=tmp_path, check=True)
    library = tmp_path / "op.so"
    flags = read_elf(library).cpu_flags
    assert any(flag.startswith("-march=") for flag in flags)
    assert ("-march=x86-64-v3" in flags) == (processor != "native")
    assert (b".debug_info" in library.read_bytes()) == debug_info
    told = subprocess.run(
        [sys.executable, "-c", "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).simd())", str(library)],
        capture_output=True,
        text=True,
    )
    assert told.stdout.strip() == str(simd)


def test_arms_macros_take_the_place_of_each_other() -> None:
    words = ("g++", "-march=native", "-D__SVE__", "-c", "op.cpp", "-o", "op.o")
    given = Command(argv=words, source="op.cpp", output="op.o")

    made = edited(given, FlagSettings(host=flags_of("armv8.2-a"), debug_info=True)).argv

    assert made[:3] == ("g++", "-march=armv8.2-a", "-D__NEON__")
