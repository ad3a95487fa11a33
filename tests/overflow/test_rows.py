"""Which memory a pass over a strided tensor reads."""

import pytest

from dsdoctor.overflow.measure.rows import Span, span


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((), (), Span(1)),
        ((5,), (1,), Span(5)),
        ((5,), (3,), Span(1, 5, 3)),
        ((2, 3, 4), (12, 4, 1), Span(24)),
        ((4, 2, 3), (1, 12, 4), Span(24)),
        ((8, 4, 128, 64), (128 * 768, 64, 768, 1), Span(256, 8 * 128, 768)),  # four of twelve heads
        ((1, 7, 1), (99, 1, 99), Span(7)),
        ((6, 3), (0, 1), Span(3, 1, 0, 6)),
        ((2, 3, 4), (100, 0, 1), Span(4, 2, 100, 3)),
        ((2, 3, 4), (100, 10, 1), None),
        ((3, 4), (2, 1), None),
    ],
)
def test_strides_become_runs(shape: tuple[int, ...], stride: tuple[int, ...], expected: Span | None) -> None:
    assert span(shape, stride) == expected
