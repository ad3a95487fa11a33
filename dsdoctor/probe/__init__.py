"""Host -> Machine. Looks, never judges. A question that fails becomes a Gap; the others are still asked."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from dsdoctor.core.host import Host
from dsdoctor.core.machine import Driver, Gap, Gpu, Machine, SearchPaths, System, Torch
from dsdoctor.core.redaction import RedactingHost
from dsdoctor.probe.paths import find_compilers, find_libraries, find_loadable, read_paths
from dsdoctor.probe.python import ask_python, ask_torch, read_deepspeed, read_jit_cache, read_torch
from dsdoctor.probe.system import ask_gpus, read_system, steering_variables
from dsdoctor.probe.toolkits import find_toolkits, judge_cache

NO_GPUS: tuple[tuple[Gpu, ...], Driver | None] = ((), None)
UNKNOWN_SYSTEM = System(architecture="unknown", os="unknown")
MAX_THREADS = 8


class _Questions:
    """Asks questions in parallel, and collects the gaps."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._gaps: dict[str, Gap] = {}

    def ask(self, question: str, look: Callable[..., Any], default: Any, *arguments: Any) -> Any:
        """Ask, and wait for the answer; ``default`` where there is none."""
        try:
            answer = look(*arguments)
        except Exception as error:
            answer = Gap(question=question, reason=f"{type(error).__name__}: {error}")
        if isinstance(answer, Gap):
            self._gaps[question] = answer
            return default
        return answer

    def begin(self, question: str, look: Callable[..., Any], default: Any, *arguments: Any) -> "Future[Any]":
        """Ask in another thread."""
        return self._pool.submit(self.ask, question, look, default, *arguments)

    def gaps(self) -> tuple[Gap, ...]:
        """What could not be queried, sorted, so that the order does not depend on timing."""
        return tuple(self._gaps[question] for question in sorted(self._gaps))


class Probing:
    """A machine that is being asked. ``early`` is the machine without what only a loaded torch knows, ``final`` all of it.

    A context manager: leaving it by an exception ends the questions that are still running.
    """

    def __init__(self, host: Host, *, python: str, cache: str, toolkit: str = "", whole: bool = True) -> None:
        self._host: Host = RedactingHost(host)
        self._python, self._cache, self._toolkit, self._whole = python, cache, toolkit, whole
        # why one more: that thread starts the others and mostly waits. More threads than that would only slow loading torch
        self._pool = ThreadPoolExecutor(max_workers=min(MAX_THREADS, host.cpus() + 1))
        self._questions = _Questions(self._pool)

    def __enter__(self) -> "Probing":
        self._begun = self._pool.submit(self._begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._host.stop()
        self._pool.shutdown()

    def early(self) -> Machine:
        """The machine from its files and tools; torch from its files."""
        self._begun.result()
        return self._machine(self._torch_of_files)

    def final(self) -> Machine:
        """The machine with what a loaded torch knows, and every gap."""
        self._begun.result()
        torch = self._torch.result()
        gaps = self._questions.gaps()
        if torch is not None and torch.broken:
            gaps += (Gap(question="torch", reason=torch.broken),)
        return replace(self._machine(torch), gaps=gaps)

    def _begin(self) -> None:
        """Ask first what the other questions need; the slow questions run in other threads."""
        host, ask = self._host, self._questions
        self._gpus = ask.begin("gpus", ask_gpus, NO_GPUS, host)
        self._compilers = ask.begin("compilers", find_compilers, (), host)
        self._paths = ask.begin("paths", read_paths, SearchPaths(), host)
        environment = ask.ask("python", ask_python, None, host, self._python)
        self._interpreter = environment.python if environment else None
        site = self._interpreter.site if self._interpreter else ()
        self._torch = ask.begin("torch", ask_torch, None, host, environment, self._whole)
        self._toolkits = ask.begin("toolkits", find_toolkits, (), host, site, self._cache, self._toolkit)
        self._shared = ask.begin("shared memory", host.shared_memory, None, "/dev/shm")
        self._system = ask.begin("system", read_system, UNKNOWN_SYSTEM, host, self._interpreter, self._cache)
        torch = environment.torch if environment else None
        self._torch_of_files = ask.ask("torch's files", read_torch, None, host, torch) if torch else None
        self._deepspeed = ask.ask("deepspeed", read_deepspeed, None, host, environment)
        self._libraries = ask.ask("libraries", find_libraries, (), host, environment)
        self._loadable = ask.ask("loader", find_loadable, None, host, environment)
        ask.ask("cache", judge_cache, None, host, self._cache)
        self._variables = ask.ask("variables", steering_variables, {}, host)
        self._names = ask.ask("names", host.names, (), "DS_")
        self._jit = ask.ask("jit", read_jit_cache, None, host, environment, self._torch_of_files)

    def _machine(self, torch: Torch | None) -> Machine:
        return Machine(
            system=self._system.result(),
            python=self._interpreter,
            torch=torch,
            deepspeed=self._deepspeed,
            toolkits=self._toolkits.result(),
            compilers=self._compilers.result(),
            gpus=self._gpus.result()[0],
            driver=self._gpus.result()[1],
            libraries=self._libraries,
            loadable=self._loadable,
            paths=self._paths.result(),
            jit=self._jit,
            variables=self._variables,
            ds_names=self._names,
            shared_memory=self._shared.result(),
        )


def probe(host: Host, *, python: str, cache: str, toolkit: str = "", whole: bool = True) -> Machine:
    """Ask everything about a machine and about the environment of ``python``.

    ``cache`` is dsdoctor's cache folder: which holds assembled toolkits and whose disk must have room;
    ``toolkit`` is one more folder to read as a toolkit; ``whole`` imports torch, else only its libraries are loaded.
    """
    with Probing(host, python=python, cache=cache, toolkit=toolkit, whole=whole) as probing:
        return probing.final()
