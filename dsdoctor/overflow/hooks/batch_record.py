"""One call of the whole model, as it was recorded -> frames."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dsdoctor.overflow.frames.frame import CallPhase, Frame, Other
from dsdoctor.overflow.measure.readings import Readings
from dsdoctor.overflow.measure.tensor_paths import Items


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a training is: the optimizer step and the micro-batch within it, both from 0; the stage of a pipeline."""

    step: int = 0
    micro: int = 0
    stage: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModulePlace:
    """A module of the model: its name, its class, and whether it has no children."""

    name: str
    kind: str
    leaf: bool


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: which, for which time, and what was seen. ``items``: names with readings or words."""

    index: int
    call: int
    items: Items
    phase: CallPhase = CallPhase.FORWARD
    raised: bool = False
    after: tuple[int, ...] = ()


@dataclass(kw_only=True)
class BatchRecord:
    """What was recorded during one call of the whole model, and during its backward."""

    batch: int
    position: Position
    training: bool
    rank: int
    places: tuple[ModulePlace, ...]
    readings: Readings
    calls: list[ModuleCall] = field(default_factory=list)
    graded: dict[int, tuple[weakref.ref[Tensor], list[int]]] = field(default_factory=dict)
    graded_handles: list[RemovableHandle] = field(default_factory=list)
    gradient_readings: Readings | None = None
    """Of the gradients, where those of the forward are settled before; None: both are in ``readings``."""

    def settle_forward(self) -> None:
        """Bring the figures of the forward to the host; gradients that come later are still seen."""
        self.readings.settle()

    def settle(self) -> None:
        """Bring the figures to the host: at most one wait per device. Gradients that come later are not seen."""
        for handle in self.graded_handles:
            handle.remove()
        self.graded_handles, self.graded = [], {}
        self.readings.settle()
        if self.gradient_readings is not None:
            self.gradient_readings.settle()

    def frames(self) -> Iterator[Frame]:
        """The frames in the order in which the calls ended: after ``settle_forward`` those of the forward, after ``settle`` all."""
        told = self.gradient_readings is None or self.gradient_readings.is_settled
        for order, call in enumerate(self.calls):
            if told or call.phase is CallPhase.FORWARD:
                yield self._frame(order, call)

    def _frame(self, order: int, call: ModuleCall) -> Frame:
        place = self.places[call.index]
        readings = self.readings if call.phase is CallPhase.FORWARD else self.gradient_readings or self.readings
        return Frame(
            batch=self.batch,
            step=self.position.step,
            micro=self.position.micro,
            stage=self.position.stage,
            rank=self.rank,
            order=order,
            module=place.name,
            kind=place.kind,
            leaf=place.leaf,
            call=call.call,
            phase=call.phase,
            training=self.training,
            raised=call.raised,
            after=tuple(self.places[index].name for index in call.after),
            tensors=tuple(
                Other(name=name, what=what) if isinstance(what, str) else readings.stats(what, name)
                for name, what in call.items
            ),
        )
