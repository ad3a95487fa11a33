"""Inside the script's process: watches every engine that deepspeed.initialize makes, and explains a failure at the end.

`dsdoctor.run` starts the script, `startup/sitecustomize.py` calls `ready` before it. Nothing here imports torch or
DeepSpeed before the script does, and nothing here ends a training, but for options that make no sense.
"""

import atexit
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Follows, Step
from dsdoctor.ranks.launchers import RANKS
from dsdoctor.run import checkpoint, guide_class, hang, memory, other_ranks

VARIABLE = "DSDOCTOR_RUN"


@dataclass(frozen=True, kw_only=True)
class RunOrder:
    """What `dsdoctor.run` hands to the script's process and to those that it starts.

    ``python``: the prefix and ``sys.hexversion`` of the one that is meant. ``main``: the pid of the script's own process.
    ``watch``: the function to call with each engine, ``module:name``. ``options``: its keyword arguments; None watches
    nothing. ``config_check``: "warn", "strict" or "off", what becomes of a doubtful DeepSpeed configuration. ``memory`` and
    ``checkpoint_check``: those of the modules of that name here. ``hang``: the fields of the hang watch's options, None for none.
    """

    python: str
    main: int
    watch: str
    options: dict[str, Any] | None
    config_check: str = "off"
    memory: str = memory.OOM
    checkpoint_check: str = checkpoint.OFF
    hang: dict[str, Any] | None = None

    def text(self) -> str:
        """As the value of an environment variable."""
        return json.dumps(asdict(self))


def ready(fields: dict[str, Any]) -> None:
    """Prepare this process, in which the script is about to run. ``fields``: those of a ``RunOrder``."""
    order = RunOrder(**fields)
    process = WatchedProcess(order)
    atexit.register(process.end)
    other_ranks.before_the_end(process.ask_the_others)
    if process.hang is not None:
        after_import(hang.MODULE, process.hang.wrap)
    wanted = (order.options, process.hang)
    if order.options is not None:
        after_import(guide_class.MODULE, process.guide_class.replace)
    if (
        any(part is not None for part in wanted)
        or order.config_check != "off"
        or order.memory != memory.OFF
        or order.checkpoint_check != checkpoint.OFF
    ):
        after_import("deepspeed", process.wrap)


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with a module once it is imported, at once where it is."""
    sys.meta_path.insert(0, AfterImport(name, then))
    if name in sys.modules:
        then(sys.modules[name])


class WatchedProcess:
    """What became of one process: whether it imported DeepSpeed, which engines it made, how it ended."""

    def __init__(self, order: RunOrder) -> None:
        self.order = order
        self.pid = os.getpid()
        self.imported = False
        self.engines = 0
        self.config_check: Any = None
        self.guide_class = guide_class.GuideClass(say)
        self.memory = memory.MemoryWatch(order.memory, say)
        self.checkpoint = checkpoint.CheckpointWatch(order.checkpoint_check, speaks=rank() in {None, "0"}, say=say)
        self.hang = None if order.hang is None else hang.HangWatch(order.hang, main=order.main, at_exit=at_exit)

    def wrap(self, deepspeed: ModuleType) -> None:
        """Put a watched ``initialize`` in the place of DeepSpeed's."""
        self.imported = True
        original = getattr(deepspeed, "initialize", None)
        if callable(original):
            deepspeed.initialize = watched(original, self.watch, self.check_config)  # type: ignore[attr-defined]

    def check_config(self, initialize: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Judge the configuration that a call of ``initialize`` is given."""
        if self.order.config_check == "off":
            return
        try:
            if self.config_check is None:
                check = importlib.import_module("dsdoctor.run.config_check").ConfigCheck
                self.config_check = check(self.order.config_check, speaks=rank() in {None, "0"}, say=say)
            self.config_check.before(initialize, args, kwargs)
        except UsageError as error:
            stop(error)
        except Exception as error:  # an error of dsdoctor's own must not end a training
            say(f"! the configuration was not judged: {type(error).__name__}: {error}")

    def watch(self, made: Sequence[Any]) -> None:
        """Watch the engine that ``initialize`` returned first. A watch that fails is a warning, and the training goes on."""
        self.memory.engine(made[0])
        self.checkpoint.engine(made[0])
        if self.hang is not None:
            self.hang.note_engine(made[0])
        if self.order.options is None:
            return
        self.engines += 1
        module, _, function = self.order.watch.partition(":")
        try:
            options = self.guide_class.options_for(made[0], self.order.options)
            watch = getattr(importlib.import_module(module), function)(made[0], **options)
            at_exit(self.close, watch)
        except UsageError as error:
            stop(error)
        except Exception as error:  # an error of dsdoctor's own must not end a training
            say(f"! the engine is not watched, and training goes on: {type(error).__name__}: {error}")

    def close(self, watch: Any) -> None:
        """End one watch."""
        try:
            watch.close()
        except Exception as error:  # at the end of a training, as above
            say(f"! a watch did not close: {type(error).__name__}: {error}")

    def ask_the_others(self) -> None:
        """When the script has failed: whether another rank did, and this one's line for them."""
        failure = self.failure()
        if not isinstance(failure, (Exception, KeyboardInterrupt)):
            return
        said = other_ranks.other_failure(failure)
        # whoever interrupts a run interrupts all ranks, and knows it
        if said and isinstance(failure, Exception):
            # at once: a launcher may end this process in a moment
            say(said)
            if self.hang is not None and (sampler := self.hang.sampler) is not None:
                sampler.told = True
                sampler.failed(failure)

    def failure(self) -> BaseException | None:
        """What ended this process, if it is one that is watched."""
        is_mine = self.pid == os.getpid() and (self.order.main == self.pid or self.imported)
        return (getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)) if is_mine else None

    def end(self) -> None:
        """At the end of the process: print what dsdoctor knows of a failure, or that there was nothing to watch."""
        main = self.order.main == os.getpid()
        if self.pid != os.getpid() or not (main or self.imported):
            return
        failure = self.failure()
        if isinstance(failure, Exception):
            try:
                self.memory.ended(failure)
                explain(failure, watching=self.engines > 0)
            except Exception as error:  # the failure's own traceback is out, and matters more
                say(f"! no diagnosis of this failure: {type(error).__name__}: {error}")
        elif main and failure is None and not self.engines and self.order.options is not None and rank() in {None, "0"}:
            others = "" if self.hang is None or self.hang.sampler is None else ", but for hangs"
            say(
                f"this process made no DeepSpeed engine, so nothing in it was watched{others}; "
                "for a plain torch module there is dsdoctor.DebugUnderflowOverflow(module)"
            )


def watched(
    initialize: Callable[..., Any], follow: Callable[[Any], None], before: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """``initialize``, which also hands what it is given to ``before``, and what it made to ``follow``."""

    @functools.wraps(initialize)
    def initialize_watched(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(initialize, args, kwargs)
        try:
            made = initialize(*args, **kwargs)
        except BaseException as error:
            # the traceback is DeepSpeed's alone: a bare raise adds no entry for this frame (from Python 3.11 on)
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise
        follow(made)
        return made

    return initialize_watched


class AfterImport:
    """A finder for ``sys.meta_path``: calls ``then`` with a module after each execution, ``importlib.reload``'s too."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader around theirs."""
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = LoaderAround(spec.loader, self.then)  # type: ignore[assignment]
                return spec
        return None


class LoaderAround:
    """A loader that does as ``inner`` does, is gone once the module runs, and calls ``then`` after it."""

    def __init__(self, inner: Any, then: Callable[[ModuleType], None]) -> None:
        self.inner = inner
        self.then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the inner loader."""
        module: ModuleType | None = self.inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module under its own loader, then report it."""
        module.__loader__ = self.inner
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        self.inner.exec_module(module)
        self.then(module)


def at_exit(function: Callable[[Any], None], argument: Any) -> None:
    """Call at the end of this process, also where it is a child of multiprocessing: those run no ``atexit``."""
    from multiprocessing import parent_process, util

    if parent_process() is None:
        atexit.register(functools.partial(_in_this_process, os.getpid(), function, argument))
    else:
        util.Finalize(None, function, args=(argument,), exitpriority=0)


def _in_this_process(pid: int, function: Callable[[Any], None], argument: Any) -> None:
    if pid == os.getpid():
        function(argument)


def rank() -> str | None:
    """This process's number among those of its launch, as its launcher says; None where there is no launcher."""
    return next((os.environ[name] for name in RANKS if os.environ.get(name)), None)


def say(*lines: str) -> None:
    """Say on stderr, each line with our name and the rank."""
    number = rank()
    mark = "dsdoctor: " if number is None else f"dsdoctor [rank {number}]: "
    # one write: the ranks' lines must not be mixed
    print("".join(f"{mark}{line}\n" for text in lines for line in text.splitlines() or [""]), end="", file=sys.stderr)


def stop(error: UsageError) -> NoReturn:
    """End before training: what was asked makes no sense."""
    say(f"✗ {error.message}", *([f"    Fix: {error.hint}"] if error.hint else []))
    raise SystemExit(error.exit_code)


def without_run(steps: Iterable[Step]) -> Iterator[Step]:
    """The steps that do not start `dsdoctor.run`; another way to do what is left out stands in its place."""
    place: Follows | None = None
    for step in steps:
        if "dsdoctor.run " in step.template:
            place = place or step.follows
            continue
        yield replace(step, follows=place) if place and step.follows is Follows.INSTEAD else step
        place = None


def explain(failure: Exception, *, watching: bool) -> None:
    """Say what dsdoctor knows of an exception that ended the script, where a rule knows it."""
    import traceback

    if isinstance(failure, SyntaxError):
        # Python has shown the line, and there is nothing to add
        return
    from dsdoctor.core.finding import Finding, Severity
    from dsdoctor.diagnosis.diagnose import diagnose
    from dsdoctor.diagnosis.models import LogOutcome
    from dsdoctor.ui.terminal import finding_lines, printable

    def known(finding: Finding) -> Finding:
        """Without the advice to run what is running."""
        if finding.fix is None or not watching:
            return finding
        return replace(finding, fix=replace(finding.fix, steps=tuple(without_run(finding.fix.steps))))

    text = "".join(traceback.format_exception(type(failure), failure, failure.__traceback__))
    read = diagnose(text.splitlines(), name="traceback")
    if read.outcome is LogOutcome.CAUSE:
        findings = [known(finding) for finding in read.findings if finding.severity is not Severity.NOTE]
        say("what this failure means:", *map(printable, finding_lines(findings)))
