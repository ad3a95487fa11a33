"""What a rank holds, thing by thing, while a step is followed; the most it held; and how bytes are written."""

from collections.abc import Iterator, Mapping

from dsdoctor.memory.models import Kind, Moment, Place, Point, Row, Run, ZeroSettings

PARAMETERS = "parameters"
FROZEN = "parameters that are not trained"
BUFFERS = "buffers of the model"
INPUTS = "inputs"
MASTER = "fp32 copy of the parameters"
STATES = "optimizer states"
GRADIENTS = "gradients"
GRADIENTS_HOST = "fp32 gradients for the optimizer"
FLAT_GRADIENTS = "gradients flattened to fp32 for the step"
STEP_TEMPORARY = "temporaries of the optimizer's step"
BUCKET = "buckets for reducing gradients (reduce_bucket_size)"
REDUCING = "gradients in transit between ranks"
COPY = "16-bit copy for the transfer from the host"
STAGING = "buffers of the size of the largest parameter"
GATHERED = "gathered parameters"
GATHERING = "parameters in transit between ranks"
ACTIVATIONS = "activations"
LOGITS = "logits and loss"
SAVING = "parameters gathered for saving"
STATES_OF_OPTIMIZERS = {"sgd": 0, "lion": 1, "adagrad": 1, "muon": 1}
"""fp32 states for each element; of all others two (Adam's and its kind's exp_avg and exp_avg_sq)."""
FP32 = 4


class Ledger:
    """Bytes by thing and place. ``together``: what is on the host counts as on the device, for there is one memory."""

    def __init__(self, *, together: bool) -> None:
        self.together = together
        self.held: dict[tuple[str, Place], int] = {}
        self.device = self.host = 0
        self._best: Mapping[tuple[str, Place], int] = {}
        self._most = self._most_host = -1

    def add(self, what: str, size: int, place: Place = "device") -> None:
        """Hold so much more of a thing, or less."""
        if not size:
            return
        place = "device" if self.together else place
        self.held[what, place] = self.held.get((what, place), 0) + size
        if place == "device":
            self.device += size
        else:
            self.host += size
        if size > 0:
            self._look()

    def hold(self, what: str, size: int, place: Place = "device") -> None:
        """Hold just so much of a thing."""
        kept: Place = "device" if self.together else place
        self.add(what, size - self.held.get((what, kept), 0), place)

    def passing(self, what: str, size: int, place: Place = "device") -> None:
        """Hold so much more for a moment."""
        self.add(what, size, place)
        self.add(what, -size, place)

    def begin(self) -> None:
        """From here on the most is sought."""
        self._most = self._most_host = -1
        self._look()

    def moment(self, point: Point) -> Moment:
        """The most since ``begin``."""
        rows = tuple(
            Row(what=what, place=place, size=size)
            for (what, place), size in sorted(self._best.items(), key=lambda item: -item[1])
            if size
        )
        return Moment(point=point, device=self._most, host=self._most_host, rows=rows)

    def _look(self) -> None:
        self._most_host = max(self._most_host, self.host)
        if self.device > self._most:
            self._most, self._best = self.device, dict(self.held)


def amount(size: int) -> str:
    """Bytes as MiB or GiB.

    >>> amount(5 << 30), amount(3 << 20)
    ('5.0 GiB', '3.0 MiB')
    """
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"


def head_end(run: Run) -> int:
    """The number of the last event at which a module with parameters ended its forward: what follows is the loss."""
    ends = [number for number, event in enumerate(run.events) if event[0] == Kind.POST_FORWARD]
    loss = next((number for number, event in enumerate(run.events) if event[0] == Kind.LOSS), 0)
    return max((number for number in ends if number < loss), default=0)


def follow(ledger: Ledger, run: Run, events: slice) -> Iterator[tuple[Kind, int]]:
    """Each event, with its bytes held: first the most before it, then what is there at it."""
    end = head_end(run)
    before = run.events[end][3] - run.logits if run.events else 0
    in_loss = True
    for number, (kind, index, most, now) in enumerate(run.events[events], events.start or 0):
        in_loss = in_loss and kind != Kind.GRADIENT
        for size in (most, now):
            logits = max(0, size - before) if number > end and in_loss else 0
            if run.logits and logits:
                ledger.add(ACTIVATIONS, min(0, size - logits - ledger.held.get((ACTIVATIONS, "device"), 0)))
                ledger.hold(LOGITS, logits)
                ledger.hold(ACTIVATIONS, size - logits)
            else:
                ledger.hold(LOGITS, 0)
                ledger.hold(ACTIVATIONS, size)
        yield Kind(kind), index


def parts(run: Run) -> tuple[slice, slice]:
    """The forward pass, with the loss, and the backward pass."""
    loss = next((number for number, event in enumerate(run.events) if event[0] == Kind.LOSS), -1)
    return slice(0, loss + 1), slice(loss + 1, len(run.events))


def state_size(settings: ZeroSettings) -> int:
    """Bytes of optimizer states for each element of the fp32 copy."""
    return FP32 * STATES_OF_OPTIMIZERS.get((settings.optimizer or "").lower(), 2)


def fused(settings: ZeroSettings) -> bool:
    """Whether the step writes in place, as DeepSpeed's own kernels do (DeepSpeedEngine.get_optimizer_configuration)."""
    return not settings.torch_adam


def step(ledger: Ledger, settings: ZeroSettings, elements: int, largest: int, place: Place) -> None:
    """An optimizer's step over so many fp32 elements, ``largest`` in one tensor: its states are there after it.

    torch.optim.Adam makes two temporaries of the denominator (``_single_tensor_adamw``, tensor after tensor, on a CPU;
    ``_multi_tensor_adamw``, of all at once, on a GPU).
    """
    ledger.hold(STATES, elements * state_size(settings), place)
    if not fused(settings):
        on_cpu = place == "host" or ledger.together
        ledger.passing(STEP_TEMPORARY, 2 * FP32 * (largest if on_cpu else elements), place)
