"""Shared objects of ops -> whether each loads with this torch, tried in a new process. Loading runs code of the op."""

import json
from collections.abc import Mapping
from pathlib import Path

from dsdoctor.core.children import PreloadedPython, parse_answer
from dsdoctor.core.deepspeed_install import library_of
from dsdoctor.core.finding import Finding, step
from dsdoctor.core.host import Answer, LocalHost
from dsdoctor.core.machine import DeepSpeed, Gap, Machine

LOAD_LIMIT = 300.0


def load_each(
    host: LocalHost, python: str, libraries: Mapping[str, Path], *, preloaded: PreloadedPython | None = None
) -> dict[str, str | None]:
    """The error of each op, None for one that loads. ``preloaded`` is that same interpreter, with torch imported."""
    # all ops in one process; if that dies, each op in a process of its own, to find the one that kills it

    def ask(ops: Mapping[str, Path], preloaded: PreloadedPython | None = None) -> dict[str, str | None] | Gap:
        pairs = json.dumps([[op, str(path)] for op, path in ops.items()])
        answer = preloaded and _asked_of(preloaded, pairs, host.environment())
        answer = answer or host.ask(python, "load_ops.py", pairs, timeout=LOAD_LIMIT)
        return parse_answer(answer, dict[str, str | None], "load")

    together = ask(libraries, preloaded)
    if preloaded is not None and (isinstance(together, Gap) or any(together.values())):
        # an error counts only where nothing but torch was there before the op
        together = ask(libraries)
    if not isinstance(together, Gap):
        return together
    first = {op: path for op, path in libraries.items() if op == "pin_memory"}
    errors: dict[str, str | None] = {}
    for op, path in libraries.items():
        alone = ask({**first, op: path})
        errors[op] = alone.reason if isinstance(alone, Gap) else alone[op]
    return errors


def _asked_of(preloaded: PreloadedPython, pairs: str, env: Mapping[str, str]) -> Answer | None:
    """What a process that has torch already answers; None where a new one is to be asked."""
    lines: list[str] = []
    status = preloaded.run("load_ops.py", pairs, folder=Path("/"), env=env, on_line=lines.append, silence=LOAD_LIMIT)
    return Answer(returncode=0, stdout="\n".join(lines)) if status == 0 else None


def lacks_driver(error: str | None, machine: Machine) -> bool:
    """Whether an op did not load only because this machine has no NVIDIA driver: that says nothing about the op."""
    return error is not None and "libcuda.so.1" in error and machine.driver is None


def lacks_instructions(error: str | None, missing: tuple[str, ...]) -> bool:
    """Whether an op did not load only because this processor lacks instructions (``missing``) that the op is compiled for.

    Loading an op runs some of its code, which ends with SIGILL then. That says nothing about the op.
    """
    return error is not None and "(SIGILL)" in error and bool(missing)


def not_tried(ops: tuple[str, ...], missing: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    """A note that loading these ops cannot be tried here: the driver is missing, or the processor lacks instructions."""
    if not ops:
        return ()
    title = f"{', '.join(ops)} link the NVIDIA driver (libcuda.so.1), which is not here: loading was not tried"
    if missing:
        lost = ", ".join(missing[:3])
        title = f"importing {', '.join(ops)} ended with SIGILL, as code with {lost} may on a processor that lacks them"
    return (Finding.note("not-proven", title, affects=ops),)


def load_installed(host: LocalHost, python: str, built: DeepSpeed, machine: Machine) -> tuple[Finding, ...]:
    """Load every op that an installed DeepSpeed has; an error for each that does not load."""
    files = {path.as_posix(): path for path in sorted(Path(built.location).rglob("*.so"))}
    named = {op: library_of(op, files) for op in built.installed_ops}
    errors = load_each(host, python, {op: files[path] for op, path in named.items() if path})
    untried = tuple(op for op, error in errors.items() if lacks_driver(error, machine))
    failed = tuple(
        Finding.error(
            "op-does-not-load",
            f"{op} does not load with this torch: {error}",
            evidence=[str(named[op])],
            affects=[op],
            fix="build it for this environment",
            steps=(step("python -m dsdoctor build-wheel --ops {op}", op=op),),
        )
        for op, error in errors.items()
        if error is not None and op not in untried
    )
    return (*failed, *not_tried(untried))
