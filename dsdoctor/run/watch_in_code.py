"""``dsdoctor.watch(engine, hang=...)``: both watches of one engine from within a script."""

from collections.abc import Mapping
from typing import Any

from dsdoctor.core.errors import UsageError
from dsdoctor.overflow.watch import engine as overflow
from dsdoctor.run.hang_in_code import watch_hangs

OPTIONS = ("after", "on_hang", "folder")


def watch(engine: Any, *, hang: Mapping[str, Any] | bool = False, **options: Any) -> overflow.Watch:
    """Watch a DeepSpeed engine; the options are those of ``Options``. Raises UsageError for what makes no sense.

    ``hang``: also say which rank does not come when nothing moves; True, or the options of ``watch_hangs``. Every rank must
    call it. Both end together.
    """
    wanted = dict(hang) if isinstance(hang, Mapping) else {}
    if wrong := [name for name in wanted if name not in OPTIONS]:
        raise UsageError(f"hang has no option {wrong[0]!r}", hint=f"one of {', '.join(OPTIONS)}")
    made = overflow.watch(engine, **options)
    if hang is not False:
        made.at_end(watch_hangs(engine, **wanted).close)
    return made
