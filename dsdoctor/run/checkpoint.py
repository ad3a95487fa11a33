"""Checkpoints under `dsdoctor.run`: rank 0 looks at the folder before `load_checkpoint`, says when nothing was loaded, and looks at
what `save_checkpoint` wrote. The quick look only: no tensor is read, and a checkpoint of very many files is left alone."""

import argparse
import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.core.errors import UsageError
from dsdoctor.core.script import CHECKPOINT_WATCH, standing_for

WARN, OFF = CHOICES = ("warn", "off")
JUDGE = "dsdoctor.run.checkpoint_check"
Say = Callable[..., None]
Arguments = Mapping[str, Any]
Hook = Callable[[Any, Arguments, Any], None]


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What is called with the engine, the method's arguments by name, and its result, or the error of one that ``failed``."""

    after: Hook
    before: Hook | None = None
    failed: Hook | None = None


def add_option(parser: argparse.ArgumentParser) -> None:
    """--checkpoint-check."""
    parser.add_argument(
        "--checkpoint-check",
        metavar="CHOICE",
        default=WARN,
        help="check a checkpoint before it is loaded and after it is saved: warn (default) or off",
    )


def chosen(value: str) -> str:
    """The choice. Raises UsageError for none."""
    if value not in CHOICES:
        hint = f"--checkpoint-check {WARN}"
        raise UsageError(f"unknown --checkpoint-check {value!r}; choose one of {', '.join(CHOICES)}", hint=hint)
    return value


class CheckpointWatch:
    """What the engines of this process load and save. ``speaks``: only one rank of a launch does."""

    def __init__(self, choice: str, *, speaks: bool, say: Say) -> None:
        self.on, self.say = choice != OFF and speaks, say

    def engine(self, engine: Any) -> None:
        """An engine was made: its class's methods are wrapped once, so that no engine is held by it."""
        if not self.on:
            return
        for name, hooks in (
            ("load_checkpoint", Hooks(before=self.loads, after=self.loaded)),
            ("save_checkpoint", Hooks(after=self.saved, failed=self.not_saved)),
        ):
            owner = next((each for each in type(engine).__mro__ if name in vars(each)), None)
            if owner is not None and not hasattr(vars(owner)[name], CHECKPOINT_WATCH):
                setattr(owner, name, wrapped(vars(owner)[name], hooks, self.quietly))

    def loads(self, engine: Any, arguments: Arguments, result: Any) -> None:  # noqa: ARG002
        """Before a load."""
        self.say_of("before_load", engine, arguments)

    def loaded(self, engine: Any, arguments: Arguments, result: Any) -> None:
        """After a load that raised nothing."""
        if isinstance(result, tuple) and result and result[0] is None:
            self.say_of("nothing_loaded", engine, arguments)

    def saved(self, engine: Any, arguments: Arguments, result: Any) -> None:  # noqa: ARG002
        """After a save that raised nothing: DeepSpeed lets no rank go before all have saved."""
        self.say_of("after_save", engine, arguments)

    def not_saved(self, engine: Any, arguments: Arguments, result: Any) -> None:
        """A save raised: ``result`` is the error."""
        self.say_of("save_failed", engine, {**arguments, "error": result})

    def say_of(self, look: str, engine: Any, arguments: Arguments) -> None:
        """Say what a look finds; what it needs is imported only now."""
        lines = getattr(importlib.import_module(JUDGE), look)(engine, arguments)
        if lines:
            self.say(*lines)

    def quietly(self, call: Callable[[], None]) -> None:
        """An error of ours must not end a training."""
        try:
            call()
        except Exception as error:
            self.say(f"! the checkpoint could not be checked; training continues: {type(error).__name__}: {error}")


def wrapped(
    method: Callable[..., Any], hooks: Hooks, quietly: Callable[[Callable[[], None]], None]
) -> Callable[..., Any]:
    """A method that calls the hooks."""
    signature = inspect.signature(method)

    def around(engine: Any, *args: Any, **kwargs: Any) -> Any:
        given: dict[str, Any] = {}
        with contextlib.suppress(TypeError):  # the method itself says so in the next moment
            bound = signature.bind(engine, *args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
        if given and hooks.before is not None:
            quietly(functools.partial(hooks.before, engine, given, None))
        try:
            result = method(engine, *args, **kwargs)
        except Exception as error:
            if given and hooks.failed is not None:
                quietly(functools.partial(hooks.failed, engine, given, error))
            raise
        if given:
            quietly(functools.partial(hooks.after, engine, given, result))
        return result

    made = standing_for(method, around)
    setattr(made, CHECKPOINT_WATCH, True)
    return made
