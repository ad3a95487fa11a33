"""Host + interpreter path -> what its environment holds."""

from dataclasses import dataclass

from dsdoctor.core.child_answers import parse_answer
from dsdoctor.core.host import Host
from dsdoctor.core.machine import Gap, Python


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An interpreter, and the folders of the packages that other questions read.

    ``torch_lacks`` are packages that torch demands and that are not there.
    """

    python: Python
    torch: str | None = None
    torch_lacks: tuple[str, ...] = ()
    deepspeed: str | None = None
    cutlass: str | None = None


def ask_python(host: Host, python: str) -> Environment | Gap:
    """Ask the interpreter who it is; torch is not imported."""
    return parse_answer(host.ask(python, "ask_python.py", timeout=60), Environment, f"python {python}")
