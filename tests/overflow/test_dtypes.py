"""Every format's bits and limits, compared with struct and with what torch says of its dtypes."""

import math
import struct

import pytest
import torch

from dsdoctor.overflow.frames.frame import BY_NAME, FORMATS, decode, limit, smallest_normal

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
