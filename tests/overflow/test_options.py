"""What makes no sense is refused in one line, before anything is hooked."""

import pytest

from dsdoctor.core.errors import UsageError
from dsdoctor.overflow.hooks.options import Options


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"level": "loud"}, "level is 'loud'"),
        ({"on_overflow": "stop"}, "on_overflow is 'stop'"),
        ({"max_frames_to_save": 0}, "max_frames_to_save holds 0"),
        ({"max_frames_to_save": True}, "max_frames_to_save holds True"),
        ({"level": "trace"}, "traces selected batches, but none was named"),
        ({"level": "guard", "trace_batch_nums": (1,)}, "level 'guard' traces none"),
        ({"level": "trace", "trace_batch_nums": (1, -2)}, "trace_batch_nums holds -2"),
        ({"level": "trace", "trace_batch_nums": ("1",)}, "trace_batch_nums holds '1'"),
        ({"include": "blocks.*"}, "include is 'blocks"),
        ({"trace_batch_nums": 3}, "trace_batch_nums is 3"),
        ({"abort_after_batch_num": -1}, "abort_after_batch_num holds -1"),
        ({"level": "trace", "trace_batch_nums": (4,), "abort_after_batch_num": 3}, "batch 4 would be traced after it"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Options(**given).check()  # type: ignore[arg-type]


def test_the_defaults_make_sense() -> None:
    Options().check()
    Options(level="trace", trace_batch_nums=(0, 3), abort_after_batch_num=3).check()
