"""What a watch is asked to do. Data only; ``check`` refuses what makes no sense."""

from dataclasses import dataclass

from dsdoctor.core.errors import UsageError

LEVELS = ("guard", "frames", "trace")
ANSWERS = ("report", "raise")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How closely to look, what to keep, and what to do about a hit.

    ``level``: ``guard`` (nothing per module until DeepSpeed finds an overflow, then a replay), ``frames`` (every module,
    every batch), ``trace`` (chosen batches, everything, to a file per rank). ``max_frames_to_save``: frames printed at a
    hit. ``trace_batch_nums``, ``abort_after_batch_num``: 0-based numbers of forward calls of the whole model, as in the
    guide. ``include``, ``exclude``: globs of module names. ``on_overflow``: ``report`` and train on, or ``raise`` the same
    exception on every rank. ``report_file``: also append findings there, as JSON lines.
    """

    level: str = "guard"
    max_frames_to_save: int = 21
    trace_batch_nums: tuple[int, ...] = ()
    abort_after_batch_num: int | None = None
    trace_dir: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    on_overflow: str = "report"
    report_file: str | None = None

    def check(self) -> None:
        """Raise UsageError for the first thing that makes no sense."""
        for name in ("include", "exclude", "trace_batch_nums"):
            require_list(name, getattr(self, name))
        require_choice("level", self.level, LEVELS)
        require_choice("on_overflow", self.on_overflow, ANSWERS)
        require_whole_number("max_frames_to_save", self.max_frames_to_save, least=1)
        for number in self.trace_batch_nums:
            require_whole_number("trace_batch_nums", number, least=0)
        if self.abort_after_batch_num is not None:
            require_whole_number("abort_after_batch_num", self.abort_after_batch_num, least=0)
        if self.level == "trace" and not self.trace_batch_nums:
            raise UsageError(
                "level 'trace' traces selected batches, but none was named", hint="trace_batch_nums=[0, 1]"
            )
        if self.trace_batch_nums and self.level != "trace":
            raise UsageError(f"trace_batch_nums were named, and level {self.level!r} traces none", hint="level='trace'")
        last = self.abort_after_batch_num
        if last is not None and (late := [number for number in self.trace_batch_nums if number > last]):
            raise UsageError(
                f"abort_after_batch_num is {last}, but batch {late[0]} would be traced after it",
                hint=f"abort_after_batch_num={max(late)}",
            )


def require_list(name: str, value: object) -> None:
    """Raise UsageError for a value that is no list. A text is refused because it would be read as a list of its letters."""
    if not isinstance(value, tuple | list):
        raise UsageError(f"{name} is {value!r}", hint=f"a list: [{value!r}]")


def require_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise UsageError if the value is none of the allowed."""
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}", hint=f"one of {', '.join(allowed)}")


def require_whole_number(name: str, value: object, *, least: int) -> None:
    """Raise UsageError if the value is no whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} holds {value!r}", hint=f"whole numbers from {least} on (batches count from 0)")
