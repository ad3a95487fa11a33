"""Inside the script's process: watches every engine that deepspeed.initialize makes, and explains a failure at the end.

`dsdoctor.run` starts the script, `startup/sitecustomize.py` calls `ready` before it. Nothing here imports torch or DeepSpeed
before the script does, and nothing here ends a training, but for options that make no sense.

transformers' DebugUnderflowOverflow, which ``TrainingArguments(debug="underflow_overflow")`` makes, is ours. If an engine is made
of the same model later, its watch takes over: every module, every batch, and the training ends at the first nan or inf that is no
matter of the loss scale.

A rank that ends by an exception leaves a line of it where the ranks found each other; one that fails and finds it says it. What
the others raise ("Connection closed by peer") tells nothing but that one has ended. Who raised first is not known: an exception
has no time, and what stands in ``finally`` may take minutes. No collective.
"""

import atexit
import functools
import importlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Follows, Step
from dsdoctor.core.script import UnlistedThread, standing_for, write_stderr
from dsdoctor.ranks.failure import Failure, read_failure
from dsdoctor.ranks.launchers import RANKS
from dsdoctor.run import checkpoint, hang, memory, op_compile

MODULE = "transformers.debug_utils"
NAME = "DebugUnderflowOverflow"
OURS = "dsdoctor.overflow.watch.debug"
COUNT = "dsdoctor/raised"
EXIT_TIMEOUT_SECONDS = 3.0
"""Seconds that an answer may take at the end of a process, whatever its store, the store's host and other threads do."""
MAX_MESSAGE_CHARACTERS = 400
VARIABLE = "DSDOCTOR_RUN"
HALF_BUILT = "masked-jit-failure"
"""The rule of an op whose compile failed in another process or before: a consequence, and all that this process can know."""


@dataclass(frozen=True, kw_only=True)
class RunOrder:
    """What `dsdoctor.run` hands to the script's process and to those that it starts.

    ``python``: the prefix and ``sys.hexversion`` of the one that is meant. ``main``: the pid of the script's own process.
    ``watch``: the function to call with each engine, ``module:name``. ``options``: its keyword arguments; None watches
    nothing. ``config_check``: "warn", "strict" or "off", what becomes of a doubtful DeepSpeed configuration. ``memory`` and
    ``checkpoint_check``: those of the modules of that name here. ``hang``: the fields of the hang watch's options, None for none.
    ``ignored``: variables that Python must not see, and the script does.
    """

    python: str
    main: int
    watch: str
    options: dict[str, Any] | None
    config_check: str = "off"
    memory: str = memory.OOM
    checkpoint_check: str = checkpoint.OFF
    hang: dict[str, Any] | None = None
    ignored: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """As the value of an environment variable."""
        return json.dumps(asdict(self))


class GuideClass:
    """What was made in the place of transformers' class in this process."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._made: list[Any] = []
        self._is_said = False

    def replace(self, module: ModuleType) -> None:
        """Put ours in the place of transformers' class, before other modules take it from there."""
        if not hasattr(module, NAME):
            return
        try:
            ours = getattr(importlib.import_module(OURS), NAME)
        except ImportError as error:  # transformers without torch
            self._say(f"! transformers' {NAME} stays: {error}")
            return
        setattr(module, NAME, self._announced(ours))

    def _announced(self, ours: Any) -> Any:
        """A class that says what it is, and of which there is one for each model: a Trainer makes a new one in each ``train``."""
        mine = self

        class DebugUnderflowOverflow(ours):  # type: ignore[misc]
            __doc__ = ours.__doc__

            def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
                mine.end(lambda known: known is model)
                super().__init__(model, *args, **kwargs)
                if not mine._is_said:
                    mine._is_said = True
                    mine._say(f"dsdoctor's {NAME} replaces transformers'")
                mine._made.append(self)

        DebugUnderflowOverflow.__qualname__ = NAME
        return DebugUnderflowOverflow

    def end(self, of: Callable[[Any], bool]) -> bool:
        """Detach those whose model is asked for. Returns whether there was one."""
        found = [each for each in self._made if of(each.model)]
        for each in found:
            each.detach()
            self._made.remove(each)
        return bool(found)

    def options_for(self, engine: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The options of the engine's watch: closer where the class watched one of its modules until now."""
        modules = set(engine.module.modules()) if self._made else set()
        if not self.end(lambda known: known in modules):
            return options
        level = "frames" if options.get("level", "guard") == "guard" else options["level"]
        self._say(
            f'! debug="underflow_overflow": the engine\'s watch takes over at level {level}, and stops training at the first '
            "overflow that the loss scale does not explain"
        )
        return {**options, "level": level, "on_overflow": "raise"}


def before_the_end(function: Callable[[], None]) -> None:
    """Call a function when the script has ended, while threads can be started: Python 3.12 forbids that from ``atexit`` on."""
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(function)


def other_failure(failure: Failure) -> str:
    """Leave a line about this rank's failure. Returns the line of another rank; empty: there is none, or nobody can be asked."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    said: list[str] = []
    try:
        if c10d is None or not c10d.is_initialized() or c10d.get_world_size() < 2:
            return ""
        # here, and not in that thread: another thread of the script's may be importing them
        importlib.import_module("encodings.idna")
        importlib.import_module("socket")
        asked = _Asked(c10d._get_default_store(), c10d.get_rank(), failure_line(failure), follows(failure), said)
        # whoever holds the lock of this process's client keeps a thread waiting, and not the process
        thread = UnlistedThread(asked.ask)
        thread.start()
        thread.join(EXIT_TIMEOUT_SECONDS)
    except Exception:  # the groups are gone, or no thread can be started
        return ""
    return said[0] if said else ""


class _Asked:
    """What one rank asks of the store: in a thread of its own, which may never end."""

    def __init__(self, store: Any, rank: int, mine: str, is_consequence: bool, said: list[str]) -> None:
        self.store, self.rank, self.mine, self.is_consequence, self.said = store, rank, mine, is_consequence, said

    def ask(self) -> None:
        try:
            _reach(self.store)
            # a connection of our own: that of the process may be in use, by a wait of half an hour
            store = self.store.clone() if hasattr(self.store, "clone") else self.store
            number = 0
            if not self.is_consequence:
                number = store.add(COUNT, 1)
                store.set(f"{COUNT}/{number}", f"rank {self.rank} raised {self.mine}")
            if number != 1 and store.check([f"{COUNT}/1"]):
                said: str = store.get(f"{COUNT}/1").decode(errors="replace")
                self.said += [] if said.endswith(f" raised {self.mine}") else [said]
        except Exception:  # the store's host is gone
            return


def _reach(store: Any) -> None:
    """Raise OSError where the store has ended with its host: torch prints a page about that, and this does not."""
    import socket

    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if host is not None and port is not None:
        socket.create_connection((host, port), timeout=EXIT_TIMEOUT_SECONDS).close()


def follows(failure: Failure) -> bool:
    """Whether an exception, or one that it was raised from or while treating, only says that another rank is gone or does not
    come.

    >>> follows(read_failure(RuntimeError("wait timeout after 2000ms, keys: /default_pg/0//ready")))
    True
    >>> follows(read_failure(KeyError("label")))
    False
    """
    from dsdoctor.diagnosis.relations import SAYS_ANOTHER_IS_GONE

    return any(
        "DistError" in cause.kinds or "NCCL " in cause.printed or SAYS_ANOTHER_IS_GONE.search(cause.printed)
        for cause in failure.causes
    )


def failure_line(failure: Failure) -> str:
    """A failure in a line, with the innermost place in the user's own code.

    >>> failure_line(read_failure(ValueError("no such\\nlabel")))
    'ValueError: no such'
    >>> failure_line(read_failure(SyntaxError("invalid syntax", ("/work/model.py", 3, 1, "x = = 1"))))
    'SyntaxError: invalid syntax (model.py, line 3)'
    """
    from dsdoctor.core.redaction import Hidden
    from dsdoctor.ui.terminal import printable

    said = failure.causes[0].printed.partition("\n")[0]
    at = failure.place
    place = f" at {Path(at.file).name}:{at.line}" if at is not None else ""
    return printable(Hidden(dict(os.environ)).out_of(f"{said[:MAX_MESSAGE_CHARACTERS]}{place}"))


def ready(fields: dict[str, Any]) -> None:
    """Prepare this process, in which the script is about to run. ``fields``: those of a ``RunOrder``."""
    order = RunOrder(**fields)
    if order.main == os.getpid():
        os.environ.update(order.ignored)
    process = WatchedProcess(order)
    atexit.register(process.end)
    before_the_end(process.ask_the_others)
    if process.hang is not None:
        after_import(hang.MODULE, process.hang.wrap)
    wanted = (order.options, process.hang)
    if order.options is not None:
        after_import(MODULE, process.guide_class.replace)
    if (
        any(part is not None for part in wanted)
        or order.config_check != "off"
        or order.memory != memory.OFF
        or order.checkpoint_check != checkpoint.OFF
    ):
        after_import("deepspeed", process.wrap)
        if os.environ.get("LOCAL_RANK", rank() or "0") == "0":
            # one of a node: all of its ranks wait for the same compile
            after_import(op_compile.MODULE, op_compile.CompileNotices(mark()).wrap)


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
        self._record: Failure | None = None
        self.guide_class = GuideClass(say)
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
            say(f"! the configuration could not be checked: {type(error).__name__}: {error}")

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
            # weakly: the engine holds its watch, and a script that drops an engine gets its memory back
            at_exit(self.close, weakref.ref(watch))
        except UsageError as error:
            stop(error)
        except Exception as error:  # an error of dsdoctor's own must not end a training
            say(f"! the engine is not watched; training continues: {type(error).__name__}: {error}")

    def close(self, watch: "weakref.ref[Any]") -> None:
        """End one watch, where its engine is still there."""
        try:
            if (here := watch()) is not None:
                here.close()
        except Exception as error:  # at the end of a training, as above
            say(f"! a watch could not be closed: {type(error).__name__}: {error}")

    def ask_the_others(self) -> None:
        """When the script has failed: whether another rank did, and this one's line for them."""
        failure = self.failure()
        if not isinstance(failure, (Exception, KeyboardInterrupt)):
            return
        try:
            record = self.record(failure)
            said = other_failure(record)
        except Exception:  # an exception may raise where it is read
            return
        # whoever interrupts a run interrupts all ranks, and knows it
        if said and isinstance(failure, Exception):
            # at once: a launcher may end this process in a moment
            say(said)
            if self.hang is not None and (sampler := self.hang.sampler) is not None:
                sampler.told = True
                sampler.failed(record)

    def failure(self) -> BaseException | None:
        """What ended this process, if it is one that is watched."""
        is_mine = self.pid == os.getpid() and (self.order.main == self.pid or self.imported)
        return (getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)) if is_mine else None

    def record(self, failure: BaseException) -> Failure:
        """What ended this process, read once."""
        self._record = self._record or read_failure(failure)
        return self._record

    def end(self) -> None:
        """At the end of the process: print what dsdoctor knows of a failure, or that there was nothing to watch."""
        main = self.order.main == os.getpid()
        if self.pid != os.getpid() or not (main or self.imported):
            return
        failure = self.failure()
        if isinstance(failure, Exception):
            try:
                self.memory.ended(self.record(failure), failure.__traceback__)
                explain(failure, watching=self.engines > 0)
            except Exception as error:  # the failure's own traceback is out, and matters more
                say(f"! no diagnosis of this failure: {type(error).__name__}: {error}")
        elif main and failure is None and not self.engines and self.order.options is not None and rank() in {None, "0"}:
            others = "" if self.hang is None or self.hang.sampler is None else ", but for hangs"
            say(
                f"this process created no DeepSpeed engine, so nothing in it was watched{others}; "
                "for a plain torch module, use dsdoctor.DebugUnderflowOverflow(module)"
            )


def watched(
    initialize: Callable[..., Any], follow: Callable[[Any], None], before: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """``initialize``, which also hands what it is given to ``before``, and what it made to ``follow``."""

    def initialize_watched(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(initialize, args, kwargs)
        made = initialize(*args, **kwargs)
        follow(made)
        return made

    return standing_for(initialize, initialize_watched)


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


def mark() -> str:
    """What stands before each of our lines: our name, and the rank where there is one."""
    number = rank()
    return "dsdoctor: " if number is None else f"dsdoctor [rank {number}]: "


def say(*lines: str) -> None:
    """Say on stderr, each line with our name and the rank."""
    # one write: the ranks' lines must not be mixed
    write_stderr("".join(f"{mark()}{line}\n" for text in lines for line in text.splitlines() or [""]))


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
        yield replace(step, follows=place) if place and step.follows is Follows.ALTERNATIVE else step
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
    half_built = any(finding.rule == HALF_BUILT for finding in read.findings)
    if read.outcome is LogOutcome.CAUSE or half_built:
        findings = [known(finding) for finding in read.findings if finding.severity is not Severity.NOTE]
        say("what this failure means:", *map(printable, finding_lines(findings)))
