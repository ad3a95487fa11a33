"""Without ZeRO: what a rank holds at each call. Formulas of DeepSpeed 0.19: ``runtime/engine.py`` (DeepSpeedEngine),
``runtime/fp16/fused_optimizer.py`` (FP16_Optimizer), ``runtime/fp16/unfused_optimizer.py`` (FP16_UnfusedOptimizer)."""

from dsdoctor.memory import names, optimizer
from dsdoctor.memory.account import Account
from dsdoctor.memory.models import SIZES, Layout, ModelShape, ZeroSettings

ALLREDUCE_ELEMENTS = 500_000_000
"""``elements_per_buffer`` of DeepSpeedEngine.buffered_allreduce_fallback, which no configuration changes."""


class Stage0:
    """All parameters, gradients and optimizer states on every rank."""

    def __init__(self, account: Account, settings: ZeroSettings, model: ModelShape, layout: Layout) -> None:
        self.account, self.settings, self.model, self.layout = account, settings, model, layout
        self.size = SIZES[settings.dtype]
        self.counts = [model.parameters[number][1] for number in model.trained]
        self.trained = sum(self.counts)
        self.first = self.last = True
        self.low_precision = settings.dtype != "float32"

    def initialize(self) -> None:
        """FP16_Optimizer.__init__ and FP16_UnfusedOptimizer.__init__: fp32 copies, and a step of the optimizer already
        (initialize_optimizer_states), so that its states are there before the training. In fp32 there is neither."""
        self.account.hold(names.PARAMETERS, self.model.elements * self.size)
        self.account.hold(names.BUFFERS, self.model.buffers)
        if self.low_precision:
            self.account.hold(names.MASTER, self.trained * 4)
            self.account.hold(names.STATES, self.trained * optimizer.state_size(self.settings))

    def before_forward(self, module: int) -> None:
        """Nothing: all parameters are here."""

    after_forward = before_backward = after_backward = before_forward

    def micro_step(self, number: int, *, last: bool) -> None:
        """Gradients are there already, or not; ranks communicate after the last one alone."""
        self.first, self.last = number == 0, last

    def forward_begins(self) -> None:
        """Nothing."""

    def gradient(self, number: int) -> None:
        """It stays as it is until the step; a later one is added to it."""
        if self.model.parameters[number][2] and self.first:
            self.account.add(names.GRADIENTS, self.model.parameters[number][1] * self.size)

    def backward_ends(self) -> None:
        """DeepSpeedEngine.allreduce_bucket makes gradients flat, so many at a time, and copies them back."""
        if self.layout.world == 1 or not self.last:
            return
        elements, many = 0, 0
        for count in self.counts:
            elements, many = elements + count, many + 1
            if elements > ALLREDUCE_ELEMENTS:
                self._reduce(elements, many)
                elements = many = 0
        self._reduce(elements, many)

    def _reduce(self, elements: int, many: int) -> None:
        """A flat copy, and one in the type of communication; a single tensor is not copied to be flat."""
        other = self.settings.communication_dtype != self.settings.dtype
        size = (self.size if many > 1 else 0) + (SIZES[self.settings.communication_dtype] if other else 0)
        self.account.passing(names.REDUCING, elements * size)

    def step(self) -> None:
        """The unfused wrapper has all gradients in both types; the fused one casts and flattens them in between."""
        largest = max(self.counts, default=0)
        if self.low_precision:
            copies = 2 if optimizer.fused(self.settings) else 1
            self.account.passing(names.FLAT_GRADIENTS, self.trained * 4 * copies)
            if copies == 2:
                self.account.hold(names.GRADIENTS, 0)
            self.account.hold(names.FLAT_GRADIENTS, self.trained * 4)
        optimizer.step(self.account, self.settings, self.trained, largest, "device")
        self.account.hold(names.FLAT_GRADIENTS, 0)
        self.account.hold(names.GRADIENTS, 0)

    def save(self) -> None:
        """What is saved is what is here."""
