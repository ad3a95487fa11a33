"""The variables of a build: those that it sets and unsets, findings about the caller's, and shell lines that set them. Pure.

The lines are safe to ``eval`` whatever characters the paths hold.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from dsdoctor.core.build_models import HeadersPlan, Source, ToolkitPlan
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import Compiler, Machine
from dsdoctor.core.text import nearest
from dsdoctor.rules import book

DROPPED = ("CUDACXX", "MAX_JOBS", "MAKEFLAGS", "PYTORCH_NVCC", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH")
NOT_OPS = ("DS_BUILD_OPS", "DS_BUILD_STRING")
MIN_SIMILARITY = 0.8
SHELLS = ("bash", "zsh", "fish", "csh")
SHELL_ALIASES = {"tcsh": "csh"}


@dataclass(frozen=True, kw_only=True)
class ShellSettings:
    """Variables to set, and folders to put in front of path variables. ``before`` is what those hold now."""

    values: Mapping[str, str]
    prepend: Mapping[str, tuple[str, ...]]
    before: Mapping[str, str]


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


def unset_variables(machine: Machine) -> tuple[str, ...]:
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
            findings.append(
                book.finding("variable-overridden", Severity.NOTE, case="build", variable=name, value=value)
            )
        elif name.startswith("NVCC_"):
            findings.append(
                book.finding("variable-reaches-nvcc", Severity.NOTE, case="build", variable=name, value=value)
            )
        elif name in {"CUDA_HOME", "CUDA_PATH"}:
            findings += _cuda_home(name, value, machine, toolkit)
    return tuple(findings)


def lines_for(shell: str, settings: ShellSettings) -> tuple[str, ...]:
    """The lines for a shell. Raises UsageError for a shell that is not in SHELLS, or that cannot take one of the values."""
    shell = SHELL_ALIASES.get(shell, shell)
    if shell not in SHELLS:
        raise UsageError(
            f"--shell {shell!r} is not a supported shell", hint=f"use one of {', '.join((*SHELLS, *SHELL_ALIASES))}"
        )
    setter = {"bash": _posix, "zsh": _posix, "fish": _fish, "csh": _csh}[shell]
    values = (setter(name, value) for name, value in sorted(settings.values.items()))
    return (*values, *_prepended(settings, shell))


def _unread(name: str, value: str, source: Source, known: list[str]) -> Finding:
    near = nearest(name, known, min_likeness=MIN_SIMILARITY)
    if not near:
        return book.finding(
            "variable-misspelt",
            Severity.WARNING,
            case="build",
            variable=name,
            value=value,
            version=source.version,
            accelerator=source.accelerator,
        )
    return book.finding(
        "variable-misspelt",
        Severity.WARNING,
        case="build-near",
        variable=name,
        value=value,
        version=source.version,
        accelerator=source.accelerator,
        near=near,
    )


def _cuda_home(name: str, value: str, machine: Machine, chosen: ToolkitPlan | None) -> list[Finding]:
    named = next((known for known in machine.toolkits if f"{name.lower()}_variable" in known.found_via), None)
    if named is not None:
        other = chosen is not None and chosen.root != named.root
        if not other:
            return []
        release = named.version
        return [
            book.finding("variable-overridden", Severity.NOTE, case="toolkit", variable=name, value=value, cuda=release)
        ]
    return [
        book.finding(
            "cuda-home-wrong",
            Severity.WARNING,
            case="build-list" if ":" in value else "build",
            variable=name,
            value=value,
        )
    ]


def _prepended(settings: ShellSettings, shell: str) -> tuple[str, ...]:
    lines = []
    for name, folders in sorted(settings.prepend.items()):
        joined = ":".join(folders)
        if shell == "fish":
            lines.append(f"set -gx --path {name} {' '.join(map(quoted_for_fish, folders))} ${name};")
        elif shell == "csh":
            # csh has no way to ask for a variable that may be unset within one line: what it holds now is written out
            before = settings.before.get(name)
            lines.append(_csh(name, f"{joined}:{before}" if before else joined))
        else:
            lines.append(f'export {name}={shlex.quote(joined)}"${{{name}:+:${name}}}";')
    return tuple(lines)


def _posix(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)};"


def _fish(name: str, value: str) -> str:
    return f"set -gx {name} {quoted_for_fish(value)};"


def _csh(name: str, value: str) -> str:
    return f"setenv {name} {quoted_for_csh(value)};"


def quoted_for_fish(text: str) -> str:
    """A word quoted for fish: in single quotes only the quote and the backslash are special; a line break is put outside them.

    >>> quoted_for_fish("it's")
    "'it\\\\'s'"
    """
    inner = text.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + inner.replace("\n", "'\\n'") + "'"


def quoted_for_csh(text: str) -> str:
    """A word quoted for csh: in single quotes; a quote and an exclamation mark are put outside them, after a backslash.

    >>> print(quoted_for_csh("a'b"))
    'a'\\''b'
    """
    if re.search(r"[\n\r]", text):
        raise UsageError(f"csh can't handle a path with a line break: {text!r}", hint="use --shell bash, zsh or fish")
    return "'" + re.sub(r"(['!])", r"'\\\1'", text) + "'"
