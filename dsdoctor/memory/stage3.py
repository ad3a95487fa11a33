"""ZeRO-3: what a rank holds at each call. Formulas of DeepSpeed 0.19's ``runtime/zero/stage3.py``
(DeepSpeedZeroOptimizer_Stage3) and ``runtime/zero/partition_parameters.py`` (Init)."""

from dsdoctor.memory import names, optimizer
from dsdoctor.memory.account import Account
from dsdoctor.memory.gather import Gathered
from dsdoctor.memory.models import SIZES, Layout, ModelShape, Place, ZeroSettings


class Stage3:
    """Parameters are divided too: each is gathered for the module that needs it."""

    def __init__(self, account: Account, settings: ZeroSettings, model: ModelShape, layout: Layout) -> None:
        self.account, self.settings, self.model, self.layout = account, settings, model, layout
        self.size = SIZES[settings.dtype]
        self.comm = SIZES[settings.communication_dtype]
        self.accumulated = SIZES[settings.accumulation_dtype]
        self.offload = settings.offload_optimizer != "none"
        self.where: Place = "host" if self.offload else "device"
        self.parts = [-(-count // layout.world) for _, count, _ in model.parameters]
        self.trained = set(model.trained)
        self.part = sum(self.parts[number] for number in self.trained)
        self.gathered = Gathered(account, settings, model, layout, self.size)
        self.bucket: list[int] = []
        self.elements = 0
        self.kept: dict[int, int] = {}

    def initialize(self) -> None:
        """``lp_param_buffer``. ``fp32_partitioned_groups_flat``: a copy also of what is fp32 (_create_fp32_partitions compares a
        torch.device with a string, and finds that they differ: measured). The bucket, from the beginning and for good
        (``torch.empty(reduce_bucket_size)`` in _setup_for_real_optimizer). ``grad_partitions_flat_buffer``. With offload
        also the optimizer's fp32 gradients."""
        account, part = self.account, self.part
        home: Place = "host" if self.settings.offload_param != "none" else "device"
        frozen = sum(part for number, part in enumerate(self.parts) if number not in self.trained)
        account.add(names.PARAMETERS, part * self.size, home)
        account.add(names.FROZEN, frozen * self.size, home)
        account.hold(names.BUFFERS, self.model.buffers)
        account.add(names.MASTER, part * 4, self.where)
        if self.offload:
            account.add(names.GRADIENTS_HOST, part * 4, "host")
        account.add(names.GRADIENTS, part * self.accumulated, self.where)
        if self.settings.contiguous_gradients:
            account.add(names.BUCKET, self.settings.reduce_bucket_size * self.comm)

    def micro_step(self, number: int, *, last: bool) -> None:
        """Each is like the others: gradients are added to their parts in place."""

    def forward_begins(self) -> None:
        """The order of modules begins anew."""
        self.gathered.begin()

    def before_forward(self, module: int) -> None:
        """Its parameters are gathered."""
        self.gathered.fetch(module, backward=False)

    def after_forward(self, module: int) -> None:
        """They go; a view that the backward pass needs keeps its buffer."""
        before = dict(self.gathered.held)
        self.gathered.release(module, backward=False)
        for number in self.model.modules[module].parameters:
            if number in self.model.kept and number in before and number not in self.gathered.held:
                self.kept[number] = before[number]
                self.account.add(names.GATHERED, before[number])

    def before_backward(self, module: int) -> None:
        """Its parameters are gathered again."""
        self.gathered.fetch(module, backward=True)

    def after_backward(self, module: int) -> None:
        """They go."""
        self.gathered.release(module, backward=True)

    def gradient(self, number: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: into the bucket, or by itself where it is larger than that."""
        self.account.add(names.GATHERED, -self.kept.pop(number, 0))
        if number not in self.trained:
            return
        count = self.model.parameters[number][1]
        limit = self.settings.reduce_bucket_size
        if self.elements + count > limit and self.elements > 0:
            self._reduce()
        if not self.settings.contiguous_gradients or self.elements + count > limit:
            self.account.add("gradients larger than the bucket", count * self.size)
        self.bucket.append(number)
        self.elements += count

    def _reduce(self) -> None:
        """reduce_scatter_coalesced interleaves all gradients of the bucket in one more buffer; one gradient that divides
        by the ranks needs none. partition_grads then adds each part to its place. gloo, with which CPUs communicate, copies
        what it is to reduce and scatter once more (measured); NCCL does not."""
        if not self.bucket:
            return
        world = self.layout.world
        padded = sum(self.parts[number] * world for number in self.bucket)
        alone = len(self.bucket) == 1 and padded == self.elements
        within = self.settings.contiguous_gradients and self.elements <= self.settings.reduce_bucket_size
        cast = self.elements * self.comm if self.comm != self.size else 0
        if within and not self.settings.reduce_scatter:
            self.account.passing(names.REDUCING, cast)
        else:
            copies = (not alone) + self.layout.together
            self.account.passing(names.REDUCING, cast + copies * padded * self.comm)
        self.account.hold("gradients larger than the bucket", 0)
        self.bucket, self.elements = [], 0

    def backward_ends(self) -> None:
        """The rest is reduced, and modules that were left are released."""
        self._reduce()
        self.gathered.leftovers()
        for number in tuple(self.kept):
            self.account.add(names.GATHERED, -self.kept.pop(number))

    def step(self) -> None:
        """One sub-group after the other: its gradients flat and fp32, the optimizer, the parameters' copy."""
        self.gathered.free_all()
        states = self.account.held.get((names.STATES, "device" if self.account.together else self.where), 0)
        for elements, many in self._sub_groups():
            if not self.offload:
                flat = elements * self.accumulated if many > 1 else 0
                cast = elements * 4 if self.accumulated != 4 else 0
                self.account.passing(names.FLAT_GRADIENTS, flat + cast)
                self.account.hold(names.FLAT_GRADIENTS, cast or flat)
            wanted = elements * optimizer.state_size(self.settings)
            missing = min(wanted, self.part * optimizer.state_size(self.settings) - states)
            self.account.add(names.STATES, missing, self.where)
            states += missing
            if not optimizer.fused(self.settings):
                self.account.passing(names.STEP_TEMPORARY, 2 * 4 * elements, self.where)
            self.account.hold(names.FLAT_GRADIENTS, 0)
        self.gathered.gather_persistent()

    def _sub_groups(self) -> list[tuple[int, int]]:
        """Elements and tensors of each (_create_fp16_sub_groups)."""
        if self.settings.sub_group_size >= self.part:
            return [(self.part, len(self.trained))]
        found, elements, many = [], 0, 0
        for number in sorted(self.trained):
            elements, many = elements + self.parts[number], many + 1
            if elements >= self.settings.sub_group_size:
                found.append((elements, many))
                elements = many = 0
        return [*found, *([(elements, many)] if many else [])]

    def save(self) -> None:
        """stage3_gather_16bit_weights_on_model_save gathers one module after the other, and rank 0 keeps all on its host."""
        if self.settings.gather_on_save:
            largest = max(
                (sum(self.model.parameters[n][1] for n in m.parameters) for m in self.model.modules), default=0
            )
            self.account.passing(names.GATHERED, largest * self.size)
            if self.layout.rank == 0:
                self.account.passing(names.SAVING, self.model.elements * self.size, "host")
