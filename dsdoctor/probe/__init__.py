"""Host -> Machine. Looks, never judges. A question that breaks becomes a Gap; the others are still asked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dsdoctor.host import Host
from dsdoctor.machine import Driver, Gap, Gpu, Machine, System
from dsdoctor.probe.compilers import find_compilers
from dsdoctor.probe.deepspeed import read_deepspeed
from dsdoctor.probe.gpus import ask_gpus
from dsdoctor.probe.libraries import find_libraries
from dsdoctor.probe.python import ask_python
from dsdoctor.probe.system import read_system, steering_variables
from dsdoctor.probe.toolkits import find_toolkits
from dsdoctor.probe.torch import ask_torch

T = TypeVar("T")
NO_GPUS: tuple[tuple[Gpu, ...], Driver | None] = ((), None)


@dataclass
class _Round:
    """One round of questions: collects the gaps."""

    gaps: list[Gap] = field(default_factory=list)

    def ask(self, question: str, look: Callable[..., T | Gap], default: T, *arguments: Any) -> T:
        try:
            answer = look(*arguments)
        except Exception as error:
            self.gaps.append(Gap(question=question, reason=f"{type(error).__name__}: {error}"))
            return default
        if isinstance(answer, Gap):
            self.gaps.append(answer)
            return default
        return answer


def probe(host: Host, *, python: str, cache: str, toolkit: str = "") -> Machine:
    """Ask everything about a machine and about the environment of ``python``.

    ``cache`` is dsdoctor's cache folder: where assembled toolkits lie and whose disk must have room;
    ``toolkit`` is one more folder to look at as a toolkit.
    """
    ask = _Round()
    environment: Any = ask.ask("python", ask_python, None, host, python)
    interpreter = environment.python if environment else None
    torch: Any = ask.ask("torch", ask_torch, None, host, environment)
    if torch is not None and torch.broken:
        ask.gaps.append(Gap(question="torch", reason=torch.broken))
    gpus, driver = ask.ask("gpus", ask_gpus, NO_GPUS, host)
    return Machine(
        system=ask.ask("system", read_system, System(architecture="unknown", os="unknown"), host, interpreter, cache),
        python=interpreter,
        torch=torch,
        deepspeed=ask.ask("deepspeed", read_deepspeed, None, host, environment),
        toolkits=ask.ask("toolkits", find_toolkits, (), host, interpreter.site if interpreter else (), cache, toolkit),
        compilers=ask.ask("compilers", find_compilers, (), host),
        gpus=gpus,
        driver=driver,
        libraries=ask.ask("libraries", find_libraries, (), host, environment),
        variables=ask.ask("variables", steering_variables, {}, host),
        gaps=tuple(ask.gaps),
    )
