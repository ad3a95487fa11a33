"""Without ZeRO, and ZeRO-1 and -2: what a rank holds at each call. Formulas of DeepSpeed 0.19.

Stage 0: ``runtime/engine.py`` (DeepSpeedEngine), ``runtime/fp16/fused_optimizer.py`` (FP16_Optimizer) and
``runtime/fp16/unfused_optimizer.py`` (FP16_UnfusedOptimizer). Stages 1 and 2: ``runtime/zero/stage_1_and_2.py``
(DeepSpeedZeroOptimizer), and ``runtime/bf16_optimizer.py`` for stage 1 in bf16 with gradients in fp32. They lay trained
parameters out as one flat buffer, a part of it for each rank: elements, not bytes.
"""

from dataclasses import dataclass

from dsdoctor.memory import ledger as names
from dsdoctor.memory.ledger import Ledger
from dsdoctor.memory.models import SIZES, Layout, ModelShape, Place, ZeroSettings

ALLREDUCE_ELEMENTS = 500_000_000
"""``elements_per_buffer`` of DeepSpeedEngine.buffered_allreduce_fallback, which no configuration changes."""
ALIGNMENT = 2
"""``nccl_start_alignment_factor`` of DeepSpeedZeroOptimizer and BF16_Optimizer."""


class Stage0:
    """All parameters, gradients and optimizer states on every rank."""

    def __init__(self, ledger: Ledger, settings: ZeroSettings, model: ModelShape, layout: Layout) -> None:
        self.ledger, self.settings, self.model, self.layout = ledger, settings, model, layout
        self.size = SIZES[settings.dtype]
        self.counts = [model.parameters[number][1] for number in model.trained]
        self.trained = sum(self.counts)
        self.first = self.last = True
        self.low_precision = settings.dtype != "float32"

    def initialize(self) -> None:
        """FP16_Optimizer.__init__ and FP16_UnfusedOptimizer.__init__: fp32 copies, and a step of the optimizer already
        (initialize_optimizer_states), so that its states are there before the training. In fp32 there is neither."""
        self.ledger.hold(names.PARAMETERS, self.model.elements * self.size)
        self.ledger.hold(names.BUFFERS, self.model.buffers)
        if self.low_precision:
            self.ledger.hold(names.MASTER, self.trained * 4)
            self.ledger.hold(names.STATES, self.trained * names.state_size(self.settings))

    def before_forward(self, module: int) -> None:
        """Nothing: all parameters are here."""

    after_forward = before_backward = after_backward = before_forward

    def micro_step(self, number: int, *, last: bool) -> None:
        """Gradients are there already, or not; ranks communicate after the last one alone."""
        self.first, self.last = number == 0, last

    def forward_begins(self, again: frozenset[int]) -> None:
        """Nothing."""

    def gradient(self, number: int) -> None:
        """It stays as it is until the step; a later one is added to it."""
        if self.model.parameters[number][2] and self.first:
            self.ledger.add(names.GRADIENTS, self.model.parameters[number][1] * self.size)

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
        self.ledger.passing(names.REDUCING, elements * size)

    def step(self) -> None:
        """The unfused wrapper has all gradients in both types; the fused one casts and flattens them in between."""
        largest = max(self.counts, default=0)
        if self.low_precision:
            copies = 2 if names.fused(self.settings) else 1
            self.ledger.passing(names.FLAT_GRADIENTS, self.trained * 4 * copies)
            if copies == 2:
                self.ledger.hold(names.GRADIENTS, 0)
            self.ledger.hold(names.FLAT_GRADIENTS, self.trained * 4)
        names.step(self.ledger, self.settings, self.trained, largest, "device")
        self.ledger.hold(names.FLAT_GRADIENTS, 0)
        self.ledger.hold(names.GRADIENTS, 0)

    def save(self) -> None:
        """What is saved is what is here."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The flat buffer's length, a rank's part, and which parameters (by place in the order) begin or reach into it.

    ``pieces``: for each parameter of the part its elements inside of it.
    """

    flat: int
    part: int
    pieces: dict[int, int]


class Stage12:
    """All parameters on every rank; the fp32 copy, the optimizer's states and (stage 2) gradients are divided."""

    def __init__(self, ledger: Ledger, settings: ZeroSettings, model: ModelShape, layout: Layout) -> None:
        self.ledger, self.settings, self.model, self.layout = ledger, settings, model, layout
        self.size = SIZES[settings.dtype]
        self.places = {number: place for place, number in enumerate(model.trained)}
        self.counts = [model.parameters[number][1] for number in model.trained]
        self.partition = divide(self.counts, layout.world, layout.rank)
        self.offload = settings.offload_optimizer != "none"
        self.where: Place = "host" if self.offload else "device"
        self.in_part = sum(self.counts[place] for place in self.partition.pieces)
        self.at_once = settings.stage == 2 or settings.overlap_comm
        self.compact = settings.accumulation_dtype == "float32" != settings.dtype
        self.first = self.last = True
        self.bucket: list[int] = []
        self.elements = 0
        self.alone: set[int] = set()
        self.has_buckets = False

    def initialize(self) -> None:
        """DeepSpeedZeroOptimizer.__init__: ``bit16_groups_flat`` takes the parameters' place,
        ``single_partition_of_fp32_groups`` is a copy in fp32 also of what is fp32. With offload, on the host: the fp32
        gradients (initialize_optimizer_states), ``param_buffer_of_bit16_for_cpu_offload_groups`` and a
        ``temp_grad_buffer_for_cpu_offload`` of the largest parameter; one such buffer on the device too."""
        ledger, part = self.ledger, self.partition.part
        frozen = self.model.elements - sum(self.counts)
        ledger.hold(names.PARAMETERS, self.partition.flat * self.size)
        ledger.hold(names.FROZEN, frozen * self.size)
        ledger.hold(names.BUFFERS, self.model.buffers)
        ledger.hold(names.MASTER, part * 4, self.where)
        if self.offload:
            largest = max(self.counts, default=0) * self.size
            ledger.add(names.GRADIENTS_HOST, part * 4, "host")
            ledger.add(names.COPY, part * self.size, "host")
            ledger.add(names.STAGING, largest, "host")
            ledger.add(names.STAGING, largest, "device")

    def before_forward(self, module: int) -> None:
        """Nothing: all parameters are here."""

    after_forward = before_backward = after_backward = before_forward

    def micro_step(self, number: int, *, last: bool) -> None:
        """Gradients are there already, or not; ranks communicate after the last one alone."""
        self.first, self.last = number == 0, last

    def forward_begins(self, again: frozenset[int]) -> None:
        """Nothing."""

    def gradient(self, number: int) -> None:
        """process_gradients: with the first one come the buckets (setup_buckets). Stage 2 moves each into a bucket at
        once; stage 1 keeps them all until the backward pass is over."""
        if number not in self.places:
            return
        place = self.places[number]
        if self.settings.stage == 2 or self.last:
            self._set_up_buckets()
        if self.settings.stage == 2 or self.first:
            self.ledger.add(names.GRADIENTS, self.counts[place] * self._gradient_size())
        if self.settings.stage == 2 or (self.at_once and self.last):
            self._into_bucket(place)

    def _keeps_accumulated(self) -> bool:
        """use_grad_accum_attribute: stage 1 with gradients in another type than the parameters'."""
        return self.settings.stage == 1 and self.settings.accumulation_dtype != self.settings.dtype

    def _gradient_size(self) -> int:
        return SIZES[self.settings.accumulation_dtype] if self._keeps_accumulated() else self.size

    def _set_up_buckets(self) -> None:
        """torch.empty(reduce_bucket_size) for the type of communication, twice where communication overlaps."""
        if self.has_buckets or not self.settings.contiguous_gradients:
            return
        self.has_buckets = True
        many = 2 if self.settings.overlap_comm else 1
        self.ledger.add(names.BUCKET, many * self.settings.reduce_bucket_size * self._gradient_size())

    def _into_bucket(self, place: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: a gradient larger than the bucket stays by itself."""
        count = self.counts[place]
        if self.elements + count > self.settings.reduce_bucket_size:
            self._reduce()
        if self.settings.contiguous_gradients and count <= self.settings.reduce_bucket_size:
            self.ledger.add(names.GRADIENTS, -count * self._gradient_size())
        else:
            self.alone.add(place)
        self.bucket.append(place)
        self.elements += count

    def _reduce(self) -> None:
        """reduce_ipg_grads: average_tensor makes its slices flat once more (allreduce_bucket), then what is another
        rank's is dropped, and what is ours moves out of the bucket (copy_grads_in_partition)."""
        if not self.bucket:
            return
        other = self.settings.communication_dtype != self.settings.dtype or self._keeps_accumulated()
        flat = self._gradient_size() if self._slices() > 1 else 0
        cast = SIZES[self.settings.communication_dtype] if other else 0
        self.ledger.passing(names.REDUCING, self.elements * (flat + cast))
        for place in self.bucket:
            self._reduced(place)
        self.bucket, self.elements = [], 0

    def _slices(self) -> int:
        """Slices for different ranks in the bucket: those that follow each other for one rank are one slice."""
        begins = [0]
        for count in self.counts:
            begins.append(begins[-1] + count)
        found: list[int] = []
        for place in self.bucket:
            first = begins[place] // self.partition.part
            last = (begins[place + 1] - 1) // self.partition.part
            for rank in range(first, last + 1):
                if not found or found[-1] != rank:
                    found.append(rank)
        return len(found)

    def _reduced(self, place: int) -> None:
        ours = place in self.partition.pieces
        held = self.counts[place] * self._gradient_size() if place in self.alone else 0
        if ours and self.compact and self.settings.stage == 2:
            self.ledger.hold(names.FLAT_GRADIENTS, self.partition.part * 4)
        elif ours and self.offload:
            if self.settings.stage == 2 and self.settings.accumulation_steps > 1:
                self._accumulate_on_host()
            if self.settings.dtype != "float32":
                self.ledger.passing(names.REDUCING, self.partition.pieces[place] * 4)
        elif ours and self.settings.contiguous_gradients and not (self.compact and self.settings.stage == 1):
            self._take_partition()
        if self.settings.contiguous_gradients and (ours or self.settings.stage == 2) and held:
            self.ledger.add(names.GRADIENTS, -held)
            self.alone.discard(place)

    def _take_partition(self) -> None:
        """``grads_in_partition``: whole gradients of every parameter that reaches into the part, not the part alone. Those of
        the micro batches before are there beside it, in stage 2 (``all_grad_tensors``)."""
        before = self.settings.stage == 2 and not self.first
        self.ledger.hold(names.FLAT_GRADIENTS, self.in_part * self.size * (2 if before else 1))

    def _accumulate_on_host(self) -> None:
        """``accumulated_grads_in_cpu``: a buffer for each whole parameter that reaches into the part, and for good."""
        self.ledger.hold("gradients of micro batches on the host", self.in_part * self.size, "host")

    def backward_ends(self) -> None:
        """independent_gradient_partition_epilogue: the rest is reduced, the buckets go, other ranks' gradients too."""
        if self.settings.stage == 1 and not self.last:
            return
        if not self.at_once:
            # reduce_gradients goes through the parameters in their order
            for place in range(len(self.counts)):
                self._into_bucket(place)
        self._reduce()
        self.ledger.hold(names.BUCKET, 0)
        self.has_buckets = False
        self.alone.clear()
        self.ledger.hold(names.GRADIENTS, 0)
        if self.ledger.held.get((names.FLAT_GRADIENTS, "device"), 0) > self.in_part * self.size and not self.compact:
            self.ledger.hold(names.FLAT_GRADIENTS, self.in_part * self.size)

    def step(self) -> None:
        """DeepSpeedZeroOptimizer.step: the part's gradients made flat, then fp32, then the optimizer."""
        ledger, part = self.ledger, self.partition.part
        if not self.offload:
            kept = ledger.held.get((names.FLAT_GRADIENTS, "device"), 0)
            ledger.add(names.FLAT_GRADIENTS, part * self.size)
            if self.size != 4:
                ledger.add(names.FLAT_GRADIENTS, part * 4)
                ledger.add(names.FLAT_GRADIENTS, -part * self.size)
            ledger.add(names.FLAT_GRADIENTS, -kept)
        names.step(ledger, self.settings, part, part, self.where)
        ledger.hold(names.FLAT_GRADIENTS, 0)

    def save(self) -> None:
        """Each rank saves what it holds."""


class Bf16Stage1:
    """ZeRO-1 in bf16 with gradients in fp32 (BF16_Optimizer): whole fp32 gradients on every rank, all the time."""

    def __init__(self, ledger: Ledger, settings: ZeroSettings, model: ModelShape, layout: Layout) -> None:
        self.ledger, self.settings, self.model, self.layout = ledger, settings, model, layout
        self.counts = [model.parameters[number][1] for number in model.trained]
        self.partition = divide(self.counts, layout.world, layout.rank)
        self.first = self.last = True

    def initialize(self) -> None:
        """BF16_Optimizer._setup_for_real_optimizer: ``bf16_groups_flat``, ``fp32_groups_flat_partition``,
        ``fp32_groups_gradients_flat``."""
        frozen = self.model.elements - sum(self.counts)
        self.ledger.hold(names.PARAMETERS, self.partition.flat * 2)
        self.ledger.hold(names.FROZEN, frozen * 2)
        self.ledger.hold(names.BUFFERS, self.model.buffers)
        self.ledger.hold(names.MASTER, self.partition.part * 4)
        self.ledger.hold(names.GRADIENTS, self.partition.flat * SIZES[self.settings.accumulation_dtype])

    def before_forward(self, module: int) -> None:
        """Nothing: all parameters are here."""

    after_forward = before_backward = after_backward = before_forward

    def micro_step(self, number: int, *, last: bool) -> None:
        """Gradients are there already, or not; ranks communicate after the last one alone."""
        self.first, self.last = number == 0, last

    def forward_begins(self, again: frozenset[int]) -> None:
        """Nothing."""

    def gradient(self, number: int) -> None:
        """bf16 gradients stay until they are added to the fp32 ones, at the end of the backward pass (update_hp_grads)."""
        if self.model.parameters[number][2]:
            self.ledger.add("bf16 gradients", self.model.parameters[number][1] * 2)

    def backward_ends(self) -> None:
        """The sums are reduced in place of the fp32 buffer's views, as in stage 0."""
        self.ledger.hold("bf16 gradients", 0)
        if self.layout.world > 1 and self.last:
            self.ledger.passing(names.REDUCING, sum(self.counts) * 4)

    def step(self) -> None:
        """In place, on the part's views."""
        names.step(self.ledger, self.settings, self.partition.part, self.partition.part, "device")

    def save(self) -> None:
        """Each rank saves what it holds."""


def divide(counts: list[int], world: int, rank: int) -> Partition:
    """The part of a rank (DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned, get_data_parallel_partitions).

    >>> divide([5, 4], 2, 1)
    Partition(flat=12, part=6, pieces={1: 3})
    """
    unit = ALIGNMENT * world
    flat = -(-sum(counts) // unit) * unit
    part = flat // world
    begin, end = part * rank, part * (rank + 1)
    pieces, offset = {}, 0
    for place, count in enumerate(counts):
        inside = min(offset + count, end) - max(offset, begin)
        if inside > 0:
            pieces[place] = inside
        offset += count
    return Partition(flat=flat, part=part, pieces=pieces)
