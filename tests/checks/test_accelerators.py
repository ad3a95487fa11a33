"""Accelerators whose ops are not judged: by what torch says of itself, and by the packages beside it."""

import json
from dataclasses import replace
from pathlib import Path

from dsdoctor.checks.python import torch_without_cuda
from dsdoctor.core.machine import Machine
from dsdoctor.probe.observe import observe
from tests.builder.test_wheel import NAME, contents, wheel
from tests.checks.sick import H100
from tests.cli.runner import run
from tests.each import each
from tests.machines.make import HERE

CPU = "__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None"
UNJUDGED = {
    "torch.version.hip": (
        CPU.replace("+cpu", "").replace("hip: Optional[str] = None", "hip = '6.4.1'"),
        "",
        {},
        "ROCm",
    ),
    "torch.version.xpu": (CPU.replace("+cpu", ""), "xpu: Optional[str] = '20250101'", {}, "XPU"),
    "local version xpu": (CPU.replace("+cpu", "+xpu"), "", {}, "XPU"),
    "local version rocm": (CPU.replace("+cpu", "+rocm6.4"), "", {}, "ROCm"),
    "torch_npu": (CPU, "", {"torch-npu": "2.9.0"}, "NPU"),
    "habana": (CPU, "xpu: Optional[str] = None", {"habana-torch-plugin": "1.22.0"}, "HPU"),
}
VERSION_FILE = "/torch/version.py"


def recorded(place: Path, version: str, xpu: str, packages: dict[str, str]) -> str:
    """A recorded machine whose torch says something else of itself."""
    snapshot = json.loads((HERE / "cpu-flavour.json").read_text())
    answers = snapshot["answers"]
    asked = next(key for key in answers if VERSION_FILE in key)
    answers[asked] = version
    pattern = asked.partition(VERSION_FILE)[2]
    answers[asked.replace(pattern, pattern[0] + r"^xpu\b.*$")] = xpu
    python = next(key for key in answers if key.startswith("ask") and key.endswith("ask_python.py"))
    answers[python]["stdout"] = answers[python]["stdout"].replace(
        '"packages": {', '"packages": {' + "".join(f'"{name}": "{number}", ' for name, number in packages.items())
    )
    file = place / "machine.json"
    file.write_text(json.dumps(snapshot))
    return str(file)


def seen(file: str) -> Machine:
    return observe("", Path(file), whole=True).machine


@each("version, xpu, packages, kind", UNJUDGED.values(), ids=tuple(UNJUDGED))
def test_torch_and_the_packages_beside_it_say_which_accelerator_is_not_judged(
    version: str, xpu: str, packages: dict[str, str], kind: str, tmp_path: Path
) -> None:
    machine = seen(recorded(tmp_path, version, xpu, packages))

    assert kind in (machine.unjudged_accelerator or "")
    assert not list(torch_without_cuda(replace(machine, gpus=(H100,))))
    assert replace(machine, variables={"DS_ACCELERATOR": "cpu"}).unjudged_accelerator is None


@each("command", [("check", "--offline"), ("plan", "--offline"), ("wheel", "verify", NAME), ("wheel", "pick", ".")])
def test_what_is_not_judged_is_never_well(command: tuple[str, ...], tmp_path: Path) -> None:
    file = recorded(tmp_path, *UNJUDGED["torch.version.xpu"][:3])
    wheel(tmp_path, contents(b""))
    paths = {NAME: str(tmp_path / NAME), ".": str(tmp_path)}

    done = run(*(paths.get(word, word) for word in command), "--machine", file)

    assert "torch 2.9.0 is an XPU build; dsdoctor" in done.stdout + done.stderr
    assert "no problems found" not in done.stdout
    assert command[0] == "check" or "✓" not in done.stdout
    assert done.returncode == 3 or command[0] != "plan"


@each("packages", [{}, {"intel-extension-for-pytorch": "2.8.0"}])
def test_a_cpu_build_is_judged_for_the_cpu(packages: dict[str, str], tmp_path: Path) -> None:
    file = recorded(tmp_path, CPU, "xpu: Optional[str] = None", packages)

    assert seen(file).unjudged_accelerator is None
    assert list(torch_without_cuda(replace(seen(file), gpus=(H100,))))
