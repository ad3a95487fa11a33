"""A bad value is followed back to the operation that made it, and to its line."""

import torch
from torch import Tensor

from dsdoctor.overflow.frames.first_bad import Cure, Origin
from dsdoctor.overflow.measure.readings import Meters
from dsdoctor.overflow.replay.operations import Operations, PlacedReadings
from dsdoctor.overflow.replay.provenance import History, Provenance


class Watched:
    """Operations that are noted, and a walk back from a tensor that was looked at."""

    def __init__(self) -> None:
        self.readings = PlacedReadings(Meters())
        self.operations = self.readings.operations = Operations(self.readings)

    def __enter__(self) -> "Watched":
        self.operations.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.operations.__exit__(None, None, None)

    def back_from(self, tensor: Tensor) -> Provenance:
        place = self.readings.places[int(self.readings.look(tensor))]
        self.readings.settle()
        return History(self.operations.done, self.readings.stats).provenance(*place)


def test_the_line_that_divided_by_zero_is_named() -> None:
    with Watched() as watched:
        x = torch.ones(4)
        y = x * 2
        z = y / 0
        end = z * 3
    found = watched.back_from(end)

    assert found.made == Origin(
        op="aten.div",
        line="test_operations.py:36 in test_the_line_that_divided_by_zero_is_named: z = y / 0",
        how="a division by 0: its divisor is 0",
        cure=Cure("divisor"),
    )


def test_an_input_that_was_bad_before_has_no_origin_and_is_named_as_what_was_there() -> None:
    given = torch.tensor([float("nan")])
    with Watched() as watched:
        torch.empty(4).fill_(1.0)
        end = given + 1
    found = watched.back_from(end)

    assert (found.made, found.received) == (None, None)
    assert found.held is not None
    assert found.held.met is not None
    assert found.held.met.line.endswith("end = given + 1")


def test_a_mask_is_no_cause_of_what_comes_after_it() -> None:
    with Watched() as watched:
        scores = torch.zeros(2, 2).masked_fill(torch.tensor([[False, True], [False, False]]), float("-inf"))
        chance = scores.softmax(-1)
        end = chance.log() * 0
    found = watched.back_from(end)

    assert found.made is not None
    assert found.made.op == "aten.log"


def test_a_masked_row_is_made_bad_by_the_softmax_and_the_mask_is_named_beside_it() -> None:
    lowest = torch.finfo(torch.float16).min
    with Watched() as watched:
        mask = torch.full((2, 2), float("-inf"))
        scores = torch.ones(2, 2) + mask
        end = scores.softmax(-1)
        torch.full((2, 2), lowest, dtype=torch.float16)
    found = watched.back_from(end)

    assert found.made is not None
    assert found.minus_inf is not None
    assert found.made.op == "aten._softmax"
    assert found.minus_inf.line.endswith("scores = torch.ones(2, 2) + mask")


def test_a_logarithm_of_zero_is_no_mask() -> None:
    with Watched() as watched:
        logarithm = torch.zeros(3).log()
        end = logarithm * 0
    found = watched.back_from(end)

    assert found.made is not None
    assert found.made.line.endswith("logarithm = torch.zeros(3).log()")


def test_what_is_written_into_a_part_is_found_from_the_whole() -> None:
    with Watched() as watched:
        x = torch.ones(4, 4)
        x[1] /= 0
        end = x.view(16).sum()
    found = watched.back_from(end)

    assert found.made is not None
    assert found.made.line.endswith("x[1] /= 0")


def test_the_line_of_the_forward_whose_backward_failed_is_named() -> None:
    x = torch.zeros(3, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True, check_nan=False), Watched() as watched:
        y = (x * 0).sqrt()
        (gradient,) = torch.autograd.grad(y.sum(), x)
    found = watched.back_from(gradient)

    assert found.made is not None
    assert found.made.op == "SqrtBackward0"
    assert found.made.line.endswith("y = (x * 0).sqrt()")
