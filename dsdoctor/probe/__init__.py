"""Host -> Machine. Looks, never judges. A question that breaks becomes a Gap; the others are still asked."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dsdoctor.host import Host
from dsdoctor.machine import Driver, Gap, Gpu, Machine, SearchPaths, System
from dsdoctor.probe.compilers import find_compilers
from dsdoctor.probe.deepspeed import read_deepspeed
from dsdoctor.probe.gpus import ask_gpus
from dsdoctor.probe.jit import read_jit_cache
from dsdoctor.probe.libraries import find_libraries
from dsdoctor.probe.paths import read_paths
from dsdoctor.probe.python import ask_python
from dsdoctor.probe.system import read_system, steering_variables
from dsdoctor.probe.toolkits import find_toolkits
from dsdoctor.probe.torch import ask_torch

NO_GPUS: tuple[tuple[Gpu, ...], Driver | None] = ((), None)
UNKNOWN_SYSTEM = System(architecture="unknown", os="unknown")
AT_ONCE = 6


class _Round:
    """One round of questions, asked side by side; collects the gaps."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._gaps: dict[str, Gap] = {}

    def ask(self, question: str, look: Callable[..., Any], default: Any, *arguments: Any) -> Any:
        """Ask now."""
        try:
            answer = look(*arguments)
        except Exception as error:
            answer = Gap(question=question, reason=f"{type(error).__name__}: {error}")
        if isinstance(answer, Gap):
            self._gaps[question] = answer
            return default
        return answer

    def begin(self, question: str, look: Callable[..., Any], default: Any, *arguments: Any) -> "Future[Any]":
        """Ask beside the others."""
        return self._pool.submit(self.ask, question, look, default, *arguments)

    def gaps(self) -> tuple[Gap, ...]:
        """What could not be asked, in an order that does not depend on who was faster."""
        return tuple(self._gaps[question] for question in sorted(self._gaps))


def probe(host: Host, *, python: str, cache: str, toolkit: str = "", whole: bool = True) -> Machine:
    """Ask everything about a machine and about the environment of ``python``.

    ``cache`` is dsdoctor's cache folder: where assembled toolkits lie and whose disk must have room;
    ``toolkit`` is one more folder to look at as a toolkit; ``whole`` imports torch, else only its libraries are loaded.
    """
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        try:
            return _probe(host, _Round(pool), python, cache, toolkit, whole=whole)
        except BaseException:
            host.stop()
            raise


def _probe(host: Host, ask: _Round, python: str, cache: str, toolkit: str, *, whole: bool) -> Machine:
    gpus = ask.begin("gpus", ask_gpus, NO_GPUS, host)
    compilers = ask.begin("compilers", find_compilers, (), host)
    paths = ask.begin("paths", read_paths, SearchPaths(), host)
    environment = ask.ask("python", ask_python, None, host, python)
    interpreter = environment.python if environment else None
    site = interpreter.site if interpreter else ()
    torch = ask.begin("torch", ask_torch, None, host, environment, whole)
    toolkits = ask.begin("toolkits", find_toolkits, (), host, site, cache, toolkit)
    system = ask.begin("system", read_system, UNKNOWN_SYSTEM, host, interpreter, cache)
    deepspeed = ask.ask("deepspeed", read_deepspeed, None, host, environment)
    libraries = ask.ask("libraries", find_libraries, (), host, environment)
    variables = ask.ask("variables", steering_variables, {}, host)
    jit = ask.ask("jit", read_jit_cache, None, host, environment, torch.result())
    broken = torch.result().broken if torch.result() else None
    return Machine(
        system=system.result(),
        python=interpreter,
        torch=torch.result(),
        deepspeed=deepspeed,
        toolkits=toolkits.result(),
        compilers=compilers.result(),
        gpus=gpus.result()[0],
        driver=gpus.result()[1],
        libraries=libraries,
        paths=paths.result(),
        jit=jit,
        variables=variables,
        ds_names=host.names("DS_"),
        gaps=ask.gaps() + ((Gap(question="torch", reason=broken),) if broken else ()),
    )
