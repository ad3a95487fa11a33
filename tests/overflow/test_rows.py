"""What the eight columns say, held against struct and against torch's own facts about its types."""

import math
import struct

import pytest
import torch

from dsdoctor.overflow.measure.rows import BY_NAME, FORMATS, Span, decode, limit, smallest_normal, span

NAMES = [form.name for form in FORMATS]


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_small_format_means_what_torch_says(name: str) -> None:
    form = BY_NAME[name]
    keys = range(256) if form.bytes == 1 else [0, 1, form.normal - 1, form.normal, form.limit - 1, form.limit]
    raw = torch.tensor(list(keys), dtype={1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[form.bytes])
    said = raw.view(getattr(torch, name)).double().tolist()
    ours = [decode(key, name) for key in keys]

    same = [a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(ours, said, strict=True)]
    assert all(same[: form.mask + 1])


@pytest.mark.parametrize(
    ("code", "integer", "name"), [("e", "H", "float16"), ("f", "I", "float32"), ("d", "Q", "float64")]
)
@pytest.mark.parametrize("value", [0.0, 5.9604644775390625e-08, 6.103515625e-05, 1.0, 65504.0, math.inf])
def test_ieee_formats_decode_as_struct_does(code: str, integer: str, name: str, value: float) -> None:
    (bits,) = struct.unpack(integer, struct.pack(code, value))

    assert decode(bits, name) == value


@pytest.mark.parametrize("name", NAMES)
def test_limits_are_those_of_torch(name: str) -> None:
    facts = torch.finfo(getattr(torch, name))

    assert limit(name) == facts.max
    assert smallest_normal(name) == facts.smallest_normal


def test_no_such_element_is_not_a_number() -> None:
    assert math.isnan(decode(-1, "float16"))


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
