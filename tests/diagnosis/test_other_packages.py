"""A build that fails is told of the package that was being built: the fix of DeepSpeed's helps no other one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.diagnosis.reading import diagnose

Lines = list[str]
PACKAGES = {
    "flash-attn": ("flash_attn", "2.7.2.post1"),
    "apex": ("apex", "0.1"),
    "transformer-engine": ("transformer_engine", "1.13.0"),
    "xformers": ("xformers", "0.0.29"),
    "vllm": ("vllm", "0.6.6"),
    "causal-conv1d": ("causal_conv1d", "1.5.0"),
    "mamba-ssm": ("mamba_ssm", "2.2.4"),
}
BEFORE = [
    "Collecting deepspeed==0.16.2",
    "  Using cached deepspeed-0.16.2.tar.gz (1.4 MB)",
    "  Preparing metadata (setup.py): done",
]
WAYS: dict[str, Lines] = {
    "collected": [
        "Collecting {name}=={version}",
        "  Getting requirements to build wheel: finished with status 'error'",
    ],
    "from its source": [
        "Collecting git+https://github.com/x/{folder}.git@v1",
        "  Getting requirements to build wheel: started",
    ],
    "wheel": ["Building wheels for collected packages: {name}", "  Building wheel for {name} (setup.py): started"],
    "uv": [
        "  × Failed to build `{name}=={version}`",
        "  ├─▶ The build backend returned an error",
        "  Getting requirements",
    ],
    "folder": ["Processing /w/src/{folder}", "  Preparing metadata (setup.py): started"],
    "setup": ['  File "/w/src/{folder}/setup.py", line 22, in <module>'],
    "frame": ['  File "/tmp/pip-install-x1/{name}_0a1b2c3d4e5f/setup.py", line 22, in <module>'],
    "poetry": ["  - Installing {name} ({version})", "  Getting requirements to build wheel"],
}
FAILURES: dict[str, Lines] = {
    "torch": ["ModuleNotFoundError: No module named 'torch'"],
    "toolkit": ["OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root."],
    "versions": [
        "RuntimeError: The detected CUDA version (11.8) mismatches the version that was used to compile PyTorch (12.4). Please "
        "make sure to use the same CUDA versions."
    ],
    "architecture": ["nvcc fatal   : Unsupported gpu architecture 'compute_120'"],
    "compiler": [
        "/usr/local/cuda/include/crt/host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions later than "
        "13 are not supported!"
    ],
    "header": ["csrc/x.h:6:10: fatal error: cusparse.h: No such file or directory"],
    "build requirement": ["ModuleNotFoundError: No module named 'packaging'"],
    "headers of Python": ["csrc/x.cpp:1:10: fatal error: Python.h: No such file or directory"],
    "no compiler": ["error: command 'g++' failed: No such file or directory"],
    "disk": ["/tmp/x.s: Fatal error: can't write 12 bytes to section .text of /tmp/x.o: No space left on device"],
    "linker": ["/usr/bin/ld: cannot find -lcudart: No such file or directory"],
    "wheel": ["error: invalid command 'bdist_wheel'"],
    "killed": ["c++: fatal error: Killed signal terminated program cc1plus", "compilation terminated."],
    "setup": [
        '  File "/tmp/pip-install-x1/{name}_0a1b2c3d4e5f/setup.py", line 9, in <module>',
        "NameError: name 'x' is not defined",
    ],
    "nothing": [
        "error: subprocess-exited-with-error",
        "× Getting requirements to build wheel did not run successfully.",
    ],
}
LAST = [
    "note: This error originates from a subprocess, and is likely not a problem with pip.",
    "ERROR: Failed to build {name}",
]


def builds(package: str) -> Iterator[tuple[str, str, Lines]]:
    """Ways of building, failures, logs."""
    folder, version = PACKAGES.get(package, (package, "1.0"))
    for (way, began), (failure, said) in itertools.product(WAYS.items(), FAILURES.items()):
        lines = [*(BEFORE if way != "wheel" else []), *began, *said, *LAST]
        yield way, failure, [line.format(name=package, folder=folder, version=version) for line in lines]


def wrong(package: str, *, every: int = 1) -> list[str]:
    """The builds of a package that are told as if they were DeepSpeed's, or with a fix for it."""
    found = []
    for way, failure, log in [*builds(package)][::every]:
        first = diagnose(log).findings[0]
        steps = [step.line for step in first.fix.steps] if first.fix else []
        text = f"{first.title} {first.fix.text if first.fix else ''}".replace("DeepSpeed is not the cause", "")
        others = [step for step in steps if "deepspeed" in step.lower() or "install --build" in step]
        unnamed = failure == "torch" and (package not in first.title or not any(package in step for step in steps))
        if "DeepSpeed" in text or others or unnamed:
            found.append(f"{package}, {way}, {failure}: [{first.rule}] {text} {steps}")
    return found


def test_the_build_of_another_package_is_told_as_its_own_in_a_sample() -> None:
    assert wrong("flash-attn", every=7) == []


@pytest.mark.slow
def test_the_build_of_another_package_is_told_as_its_own() -> None:
    assert [one for package in PACKAGES for one in wrong(package)] == []


def test_the_build_of_deepspeed_is_told_as_before() -> None:
    for way, failure, log in builds("deepspeed"):
        if failure == "torch":
            first = diagnose(log).findings[0]
            assert first.title.startswith("DeepSpeed's setup.py"), way
            assert first.fix and first.fix.steps[0].line == "python -m dsdoctor install --build", way


def test_a_folder_of_any_name_may_be_deepspeeds() -> None:
    for began in (
        ["Processing /w/my-fork"],
        ["Collecting torch", "Obtaining file:///w/ds"],
        ["Processing ./DeepSpeed-0.16.2"],
    ):
        first = diagnose([*began, "  Preparing metadata (setup.py): started", *FAILURES["torch"]]).findings[0]
        assert first.title.startswith("DeepSpeed's setup.py"), began


def test_a_package_that_was_installed_is_not_blamed_later() -> None:
    before = ["Collecting flash-attn==2.7", "Successfully installed flash-attn-2.7"]
    first = diagnose([*before, "+ pip wheel .", "  Preparing metadata (setup.py)", *FAILURES["torch"]]).findings[0]

    assert first.title.startswith("DeepSpeed's setup.py")
