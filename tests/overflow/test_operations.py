"""The operation that made the first nan or inf, and its line."""

import torch

from dsdoctor.overflow.frames.first_bad import Origin
from dsdoctor.overflow.measure.readings import Meters, Readings
from dsdoctor.overflow.replay.operations import Operations


def watched() -> tuple[Operations, Readings]:
    readings = Readings(Meters())
    return Operations(readings, lambda: 0), readings


def test_the_line_that_divided_by_zero_is_named() -> None:
    operations, readings = watched()
    with operations:
        x = torch.ones(4)
        y = x * 2
        y / 0
        y * 3
    readings.settle()

    assert operations.first_bad(0, backward=False) == Origin(
        op="aten.div", line="test_operations.py:20 in test_the_line_that_divided_by_zero_is_named: y / 0"
    )


def test_memory_that_nobody_wrote_is_no_result() -> None:
    operations, readings = watched()
    with operations:
        torch.empty(4).fill_(1.0)
    readings.settle()

    assert operations.first_bad(0, backward=False) is None


def test_a_mask_is_no_first_bad_value_and_its_line_is_known() -> None:
    operations, readings = watched()
    with operations:
        scores = torch.zeros(2, 2).masked_fill(torch.tensor([[False, True], [False, False]]), float("-inf"))
        scores.softmax(-1)
    readings.settle()

    assert operations.first_bad(0, backward=False) is None
    assert operations.first_minus_inf() is not None


def test_the_line_of_the_forward_whose_backward_failed_is_named() -> None:
    operations, readings = watched()
    x = torch.zeros(3, requires_grad=True)
    with operations, torch.autograd.set_detect_anomaly(True, check_nan=False):
        y = (x * 0).sqrt()
        y.sum().backward()
    readings.settle()
    found = operations.first_bad(0, backward=True)

    assert found is not None
    assert found.op == "SqrtBackward0"
    assert found.line.endswith("y = (x * 0).sqrt()")
