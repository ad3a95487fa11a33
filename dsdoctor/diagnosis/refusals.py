"""An exception that a library raised on purpose, and that no rule knows -> what is known of its refusal. Never a cause."""

import re
from dataclasses import dataclass

from dsdoctor.diagnosis.failures import Failure, Frame

PACKAGE = re.compile(r"(?:^|[/\\])(?P<package>deepspeed|DeepSpeed[/\\]deepspeed)[/\\](?P<file>\w[\w/\\.-]{0,200}\.py)$")
INSTALLED = re.compile(
    r"(?:site|dist)-packages[/\\](?P<package>[A-Za-z]\w{1,60})[/\\](?P<file>\w[\w/\\.-]{0,200}\.py)$"
)
ON_PURPOSE = ("raise ", "assert ")
RAISED_AGAIN = re.compile(
    r"raise (?:self\.\w{1,40}|exception|exc|error|err|ex|e)(?:\.with_traceback\(|\s{0,4}(?:#|$| from ))"
)
"""A place that only passes on what another process, thread or place raised: who stands there refused nothing."""

NAME = re.compile(r"(?<![\w.])(?:self\.|args\.|config\.)?_?([a-z][a-z0-9]{1,30}(?:_[a-z0-9]{1,30}){1,6})\b")
QUOTED = re.compile(r"['\"`<]([A-Za-z][\w.-]{2,50})['\"`>]")
MOST_NAMES = 6
NO_NAMES = {"is_initialized", "get_rank", "get_world_size", "is_tensor", "all_reduce", "value_error", "runtime_error"}
"""Functions that conditions call everywhere: they name no setting."""

TITLES = {"deepspeed": "DeepSpeed"}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Who refused, where, on which condition, and the settings or arguments that message and condition name."""

    package: str
    place: str
    condition: str
    names: tuple[str, ...]


def refusal_of(failure: Failure | None) -> Refusal | None:
    """What is known of an exception that a library raised on purpose; None for any other.

    >>> frame = Frame(path="/v/site-packages/deepspeed/runtime/x.py", line=9, function="step", source="assert self.tile_size > 1")
    >>> refusal_of(Failure(line=3, text="AssertionError: tile_size is 1", frames=(frame,)))
    Refusal(package='DeepSpeed', place='runtime/x.py:9 step', condition='self.tile_size > 1', names=('tile_size',))
    """
    last = failure.frames[-1] if failure and failure.frames else None
    if failure is None or last is None or not last.source.startswith(ON_PURPOSE) or RAISED_AGAIN.match(last.source):
        return None
    found = PACKAGE.search(last.path) or INSTALLED.search(last.path)
    if not found:
        return None
    package = re.split(r"[/\\]", found["package"])[-1]
    words, condition = failure.text.partition(": ")[2], _condition(last)
    return Refusal(
        package=TITLES.get(package, package),
        place=f"{found['file']}:{last.line} {last.function}",
        condition=condition,
        names=_names(f"{words} {condition}"),
    )


def _condition(frame: Frame) -> str:
    """The condition of an assertion; of a raised exception nothing, its words are the message."""
    if not frame.source.startswith("assert "):
        return ""
    return re.split(r",\s{0,4}f?[\"'(]|, \\$|, $|\\$", frame.source.removeprefix("assert "))[0].strip()[:160]


def _names(text: str) -> tuple[str, ...]:
    """The names of settings, arguments and attributes in a text, each once."""
    found = [*NAME.findall(text), *QUOTED.findall(text)]
    return tuple(dict.fromkeys(name for name in found if name not in NO_NAMES))[:MOST_NAMES]


def refused_title(refusal: Refusal, words: str, doing: str) -> str:
    """What is known, as a title."""
    when = f", {doing}" if doing else ""
    return f"{refusal.package} itself stopped here{when}, in {refusal.place}, and no rule of dsdoctor explains why: {words}"


def refused_evidence(refusal: Refusal) -> tuple[str, ...]:
    """The condition that did not hold, and the names in it."""
    named = (f"named in it: {', '.join(refusal.names)}",) if refusal.names else ()
    return (*((f"it asks that {refusal.condition}",) if refusal.condition else ()), *named)


def refused_question(refusal: Refusal) -> str:
    """What would decide."""
    if refusal.names:
        several = f"which of {', '.join(refusal.names)}" if len(refusal.names) > 1 else f"whether {refusal.names[0]}"
        return (
            f"{several} is set in the configuration or passed by the script would decide: print it on each rank, and run once "
            f"with its default. {refusal.package} raised this on purpose, so its own words are the best hint"
        )
    return (
        f"{refusal.package} raised this on purpose, so its own words are the best hint; the same script with the release before, "
        "or without the newest setting, would decide"
    )
