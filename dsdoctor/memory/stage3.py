"""ZeRO-3: what a rank holds at each call, and which parameters are gathered at each moment. Formulas of DeepSpeed 0.19.

Of ``runtime/zero/stage3.py`` (DeepSpeedZeroOptimizer_Stage3) and ``runtime/zero/partition_parameters.py`` (Init); gathering follows
``runtime/zero/partitioned_param_coordinator.py`` (PartitionedParameterCoordinator): a first step in which modules are noted, then
steps that gather ahead.
"""

from collections import deque

from dsdoctor.memory import ledger as names
from dsdoctor.memory.ledger import Ledger
from dsdoctor.memory.models import SIZES, Layout, ModelShape, Place, ZeroSettings


class Gathered:
    """The gathered parameters of a rank, in a ledger."""

    def __init__(self, ledger: Ledger, settings: ZeroSettings, model: ModelShape, layout: Layout, size: int) -> None:
        self.ledger, self.settings, self.model, self.layout, self.size = ledger, settings, model, layout, size
        self.counts = [count for _, count, _ in model.parameters]
        self.persistent = persistent(self.counts, settings)
        self.held: dict[int, int] = {}
        self.groups: dict[int, list[int]] = {}
        self.users: dict[int, set[int]] = {}
        self.noted: list[int] = []
        self.complete = False
        self.steps = self.available = 0
        self.queue: deque[tuple[int, int]] = deque()
        self.fetched_for: dict[int, int] = {}
        self.backward_now: list[int] = []

    def begin(self) -> None:
        """reset_step, at the forward call of the whole model: the second one knows the order of the first."""
        self._drop_in_flight()
        self.complete = self.complete or bool(self.noted)
        self.steps = self.available = 0
        self.fetched_for = {}
        self.queue = deque(self._order()) if self.complete else deque()

    def _order(self) -> list[tuple[int, int]]:
        """Each module's parameters in the order of the step, with the number of the fetch that used them."""
        return [(number, step) for step, module in enumerate(self.noted) for number in self._of(module)]

    def _of(self, module: int) -> tuple[int, ...]:
        return self.model.modules[module].parameters

    def fetch(self, module: int, *, backward: bool) -> None:
        """_fetch_sub_module_impl: gather what is missing, wait for it, then gather ahead."""
        if not self.complete:
            self.noted.append(module)
        if backward and module not in self.backward_now:
            self.backward_now.append(module)
        self._gather([number for number in self._of(module) if number not in self.held and not self._in_flight(number)])
        for number in self._of(module):
            self.users.setdefault(number, set()).add(module)
            self._wait(number)
        if self.complete:
            self._ahead(module)
        self.steps += 1

    def release(self, module: int, *, backward: bool) -> None:
        """release_sub_module: what no module needs soon, and no prefetch counted on."""
        if backward and module in self.backward_now:
            self.backward_now.remove(module)
        free = self._to_release(module)
        for number in self._of(module):
            self.users.get(number, set()).discard(module)
            if number in free and not self.users.get(number):
                self._free(number)

    def leftovers(self) -> None:
        """release_backward_leftovers: modules whose end of backward nobody told."""
        for module in reversed(self.backward_now):
            for number in self._of(module):
                self.users.get(number, set()).discard(module)
                if number not in self.persistent and not self.users.get(number):
                    self._free(number)
        self.backward_now = []

    def free_all(self) -> None:
        """_partition_all_parameters, at the beginning of the step."""
        self._drop_in_flight()
        self.users.clear()
        for number in tuple(self.held):
            self._free(number)

    def gather_persistent(self) -> None:
        """_post_step: parameters below stage3_param_persistence_threshold stay gathered."""
        for number in self.persistent:
            if number not in self.held:
                self._have(number, self._padded(number))

    def _padded(self, number: int) -> int:
        """One rank alone has the whole parameter: it gathers a view of it (NoGatherHandle), or a copy from the host."""
        world = self.layout.world
        is_here = self.layout.together or self.settings.offload_param == "none"
        return 0 if world == 1 and is_here else -(-self.counts[number] // world) * world * self.size

    def _gather(self, numbers: list[int]) -> None:
        """all_gather_coalesced: one parameter into a buffer of its own; several into one buffer, and copied out of it."""
        if not numbers:
            return
        self.available += sum(self.counts[number] for number in numbers)
        flat = sum(self._padded(number) for number in numbers)
        self.ledger.add(names.GATHERING, flat)
        for number in numbers:
            # one rank alone gathers each by itself
            self.groups[number] = numbers if self.layout.world > 1 else [number]

    def _in_flight(self, number: int) -> bool:
        return number in self.groups

    def _wait(self, number: int) -> None:
        """The buffer of several goes when the last of them has been waited for; their copies come with the first."""
        group = self.groups.pop(number, None)
        if group is None:
            return
        if len(group) == 1:
            self.ledger.add(names.GATHERING, -self._padded(number))
            self._have(number, self._padded(number))
            return
        for other in group:
            if other not in self.held:
                self._have(other, self.counts[other] * self.size)
        if not any(self.groups.get(other) is group for other in group):
            self.ledger.add(names.GATHERING, -sum(self._padded(other) for other in group))

    def _drop_in_flight(self) -> None:
        for number in tuple(self.groups):
            self._wait(number)
            self._free(number)

    def _have(self, number: int, size: int) -> None:
        self.held[number] = size
        self.ledger.add(names.GATHERED, size)

    def _free(self, number: int) -> None:
        size = self.held.pop(number, None)
        if size is not None:
            self.ledger.add(names.GATHERED, -size)
            self.available -= self.counts[number]

    def _ahead(self, module: int) -> None:
        """The prefetch, as far as stage3_prefetch_bucket_size and stage3_max_live_parameters let it."""
        new = [number for number in self._of(module) if self.fetched_for.get(number, -1) < self.steps]
        seen: set[int] = set()
        while self.queue and len(seen) < len(new):
            number, step = self.queue.popleft()
            self.fetched_for[number] = step
            seen.add(number)
        room = min(self.settings.max_live_parameters - self.available, self.settings.prefetch_bucket_size)
        ahead: list[int] = []
        elements = 0
        while self.settings.prefetch_bucket_size > 0 and self.queue and elements < room:
            number, step = self.queue.popleft()
            self.fetched_for[number] = max(self.fetched_for.get(number, -1), step)
            if number not in self.held and not self._in_flight(number) and number not in ahead:
                ahead.append(number)
                elements += self.counts[number]
        self._gather(ahead)

    def _to_release(self, module: int) -> set[int]:
        """__params_to_release: not what is used again within stage3_max_reuse_distance elements."""
        if not self.complete:
            return set(self._of(module))
        free = {
            number
            for number in self._of(module)
            if number not in self.persistent and self.fetched_for.get(number, -1) <= self.steps
        }
        passed = 0
        for later in self.noted[self.steps :]:
            if passed >= self.settings.max_reuse_distance or not free:
                break
            free.difference_update(self._of(later))
            passed += sum(self.counts[number] for number in self._of(later))
        return free


class Stage3:
    """Parameters are divided too: each is gathered for the module that needs it."""

    def __init__(self, ledger: Ledger, settings: ZeroSettings, model: ModelShape, layout: Layout) -> None:
        self.ledger, self.settings, self.model, self.layout = ledger, settings, model, layout
        self.size = SIZES[settings.dtype]
        self.comm = SIZES[settings.communication_dtype]
        self.accumulated = SIZES[settings.accumulation_dtype]
        self.offload = settings.offload_optimizer != "none"
        self.where: Place = "host" if self.offload else "device"
        self.parts = [-(-count // layout.world) for _, count, _ in model.parameters]
        self.trained = set(model.trained)
        self.part = sum(self.parts[number] for number in self.trained)
        self.gathered = Gathered(ledger, settings, model, layout, self.size)
        self.bucket: list[int] = []
        self.elements = 0
        self.kept: dict[int, int] = {}
        self.to_run_again: set[int] = set()

    def initialize(self) -> None:
        """``lp_param_buffer``. ``fp32_partitioned_groups_flat``: a copy also of what is fp32 (_create_fp32_partitions compares a
        torch.device with a string, and finds that they differ: measured). The bucket, from the beginning and for good
        (``torch.empty(reduce_bucket_size)`` in _setup_for_real_optimizer). ``grad_partitions_flat_buffer``. With offload
        also the optimizer's fp32 gradients."""
        ledger, part = self.ledger, self.part
        home: Place = "host" if self.settings.offload_param != "none" else "device"
        frozen = sum(part for number, part in enumerate(self.parts) if number not in self.trained)
        ledger.add(names.PARAMETERS, part * self.size, home)
        ledger.add(names.FROZEN, frozen * self.size, home)
        ledger.hold(names.BUFFERS, self.model.buffers)
        ledger.add(names.MASTER, part * 4, self.where)
        if self.offload:
            ledger.add(names.GRADIENTS_HOST, part * 4, "host")
        ledger.add(names.GRADIENTS, part * self.accumulated, self.where)
        if self.settings.contiguous_gradients:
            ledger.add(names.BUCKET, self.settings.reduce_bucket_size * self.comm)

    def micro_step(self, number: int, *, last: bool) -> None:
        """Each is like the others: gradients are added to their parts in place."""

    def forward_begins(self, again: frozenset[int]) -> None:
        """The order of modules begins anew."""
        self.to_run_again = set(again)
        self.gathered.begin()

    def before_forward(self, module: int) -> None:
        """Its parameters are gathered."""
        self.gathered.fetch(module, backward=False)

    def after_forward(self, module: int) -> None:
        """They go; a view that the backward pass needs keeps its buffer. What runs again saves nothing the first time."""
        before = dict(self.gathered.held)
        self.gathered.release(module, backward=False)
        if module in self.to_run_again:
            self.to_run_again.remove(module)
            return
        for number in self.model.modules[module].parameters:
            if number in self.model.kept and number in before and number not in self.gathered.held:
                self.ledger.add(names.GATHERED, before[number] - self.kept.get(number, 0))
                self.kept[number] = before[number]

    def before_backward(self, module: int) -> None:
        """Its parameters are gathered again."""
        self.gathered.fetch(module, backward=True)

    def after_backward(self, module: int) -> None:
        """They go."""
        self.gathered.release(module, backward=True)

    def gradient(self, number: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: into the bucket, or by itself where it is larger than that."""
        self.ledger.add(names.GATHERED, -self.kept.pop(number, 0))
        if number not in self.trained:
            return
        count = self.model.parameters[number][1]
        limit = self.settings.reduce_bucket_size
        if self.elements + count > limit and self.elements > 0:
            self._reduce()
        if not self.settings.contiguous_gradients or self.elements + count > limit:
            self.ledger.add("gradients larger than the bucket", count * self.size)
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
            self.ledger.passing(names.REDUCING, cast)
        else:
            copies = (not alone) + self.layout.together
            self.ledger.passing(names.REDUCING, cast + copies * padded * self.comm)
        self.ledger.hold("gradients larger than the bucket", 0)
        self.bucket, self.elements = [], 0

    def backward_ends(self) -> None:
        """The rest is reduced, and modules that were left are released."""
        self._reduce()
        self.gathered.leftovers()
        for number in tuple(self.kept):
            self.ledger.add(names.GATHERED, -self.kept.pop(number))

    def step(self) -> None:
        """One sub-group after the other: its gradients flat and fp32, the optimizer, the parameters' copy."""
        self.gathered.free_all()
        states = self.ledger.held.get((names.STATES, "device" if self.ledger.together else self.where), 0)
        for elements, many in self._sub_groups():
            if not self.offload:
                flat = elements * self.accumulated if many > 1 else 0
                cast = elements * 4 if self.accumulated != 4 else 0
                self.ledger.passing(names.FLAT_GRADIENTS, flat + cast)
                self.ledger.hold(names.FLAT_GRADIENTS, cast or flat)
            wanted = elements * names.state_size(self.settings)
            missing = min(wanted, self.part * names.state_size(self.settings) - states)
            self.ledger.add(names.STATES, missing, self.where)
            states += missing
            if not names.fused(self.settings):
                self.ledger.passing(names.STEP_TEMPORARY, 2 * 4 * elements, self.where)
            self.ledger.hold(names.FLAT_GRADIENTS, 0)
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
            self.ledger.passing(names.GATHERED, largest * self.size)
            if self.layout.rank == 0:
                self.ledger.passing(names.SAVING, self.model.elements * self.size, "host")


def persistent(counts: list[int], settings: ZeroSettings) -> tuple[int, ...]:
    """Parameters that stay gathered (DeepSpeedZeRoOffload.mark_persistent_parameters)."""
    found: list[int] = []
    total = 0
    for number, count in enumerate(counts):
        fits = count + total <= settings.model_persistence_threshold
        if fits and count <= settings.param_persistence_threshold:
            found.append(number)
            total += count
    return tuple(found)
