"""Choices + the caller's variables -> the variables that a build sets and unsets, and findings about the caller's. Pure."""

import difflib

from dsdoctor.core.build_models import HeadersPlan, Source, ToolkitPlan
from dsdoctor.core.finding import Finding, step
from dsdoctor.core.machine import Compiler, Machine

DROPPED = ("CUDACXX", "MAX_JOBS", "MAKEFLAGS", "PYTORCH_NVCC", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH")
NOT_OPS = ("DS_BUILD_OPS", "DS_BUILD_STRING")
LOOKALIKE = 0.8


def environment(
    *, accelerator: str, toolkit: ToolkitPlan | None, compiler: Compiler | None, skip_check: bool
) -> dict[str, str]:
    """The variables set for every op; each op's own TORCH_CUDA_ARCH_LIST comes on top."""
    env = {"DS_ACCELERATOR": accelerator, "DS_BUILD_OPS": "0"}
    if compiler is not None and compiler.c_path is not None:
        env |= {"CC": compiler.c_path, "CXX": compiler.path}
    if toolkit is not None:
        env |= {"CUDA_HOME": toolkit.root, "CUDA_PATH": toolkit.root}
    if skip_check:
        env["DS_SKIP_CUDA_CHECK"] = "1"
    return env


def taken_away(machine: Machine) -> tuple[str, ...]:
    """The names of the caller's variables that must not reach the build."""
    return tuple(sorted({*DROPPED, *(name for name in machine.variables if name.startswith("DS_"))}))


def prepended(machine: Machine, toolkit: ToolkitPlan | None, headers: HeadersPlan | None) -> dict[str, tuple[str, ...]]:
    """The folders put in front of path variables: the environment's scripts, the toolkit, the stub of the driver library."""
    prepend: dict[str, tuple[str, ...]] = {"PATH": (machine.python.scripts,) if machine.python else ()}
    if headers is not None:
        prepend["CPATH"] = headers.include
    if toolkit is not None:
        known = next((known for known in machine.toolkits if known.root == toolkit.root), None)
        folders = known.library_dirs if known else (f"{toolkit.root}/lib64/stubs",)
        prepend["PATH"] += (f"{toolkit.root}/bin",)
        prepend["LIBRARY_PATH"] = tuple(folder for folder in folders if folder.endswith("/stubs"))[:1]
    return {name: folders for name, folders in prepend.items() if folders}


def caller_findings(machine: Machine, source: Source, toolkit: ToolkitPlan | None) -> tuple[Finding, ...]:
    """Findings about variables in the caller's shell that would have changed the build, or were meant to."""
    findings = []
    known = [fact.variable for fact in source.ops] + list(NOT_OPS)
    for name, value in machine.variables.items():
        if name.startswith("DS_BUILD_") and name not in known:
            findings.append(_unread(name, value, source, known))
        elif name.startswith("DS_") and (name, value) != ("DS_ACCELERATOR", source.accelerator):
            findings.append(_overridden(name, value, "dsdoctor sets its own"))
        elif name.startswith("NVCC_"):
            title = f"{name}={value} is set in your shell and reaches nvcc"
            findings.append(Finding.note("variable-reaches-nvcc", title))
        elif name in {"CUDA_HOME", "CUDA_PATH"}:
            findings += _cuda_home(name, value, machine, toolkit)
    return tuple(findings)


def _unread(name: str, value: str, source: Source, known: list[str]) -> Finding:
    near = difflib.get_close_matches(name, known, n=1, cutoff=LOOKALIKE)
    meant = f"; did you mean {near[0]}?" if near else ""
    return Finding.warning(
        "variable-misspelt",
        f"{name}={value} is read by no op of DeepSpeed {source.version} for {source.accelerator}{meant}",
        fix="DeepSpeed would ignore it silently; name ops with --ops instead",
        steps=(step("unset {variable}", variable=name),),
    )


def _overridden(name: str, value: str, because: str) -> Finding:
    title = f"{name}={value} is set in your shell; this build does not see it: {because}"
    return Finding.note("variable-overridden", title)


def _cuda_home(name: str, value: str, machine: Machine, chosen: ToolkitPlan | None) -> list[Finding]:
    named = next((known for known in machine.toolkits if f"{name.lower()}_variable" in known.found_via), None)
    if named is not None:
        other = chosen is not None and chosen.root != named.root
        because = f"it is CUDA {named.version}, and the toolkit above was chosen"
        return [_overridden(name, value, because)] if other else []
    joined = " (a list with ':'; it must be one folder)" if ":" in value else ""
    return [
        Finding.warning(
            "cuda-home-wrong",
            f"{name}={value} holds no CUDA toolkit{joined}; DeepSpeed would silently build for the CPU",
            fix="this build uses its own choice; for others",
            steps=(step("unset {variable}", variable=name),),
        )
    ]
