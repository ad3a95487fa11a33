"""ZeRO-3: which parameters are gathered at each moment. Follows ``runtime/zero/partitioned_param_coordinator.py`` of DeepSpeed
0.19 (PartitionedParameterCoordinator): a first step in which modules are noted, then steps that gather ahead."""

from collections import deque

from dsdoctor.memory import names
from dsdoctor.memory.account import Account
from dsdoctor.memory.models import Layout, ModelShape, ZeroSettings


class Gathered:
    """The gathered parameters of a rank, in an account."""

    def __init__(self, account: Account, settings: ZeroSettings, model: ModelShape, layout: Layout, size: int) -> None:
        self.account, self.settings, self.model, self.layout, self.size = account, settings, model, layout, size
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
        self.account.add(names.GATHERING, flat)
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
            self.account.add(names.GATHERING, -self._padded(number))
            self._have(number, self._padded(number))
            return
        for other in group:
            if other not in self.held:
                self._have(other, self.counts[other] * self.size)
        if not any(self.groups.get(other) is group for other in group):
            self.account.add(names.GATHERING, -sum(self._padded(other) for other in group))

    def _drop_in_flight(self) -> None:
        for number in tuple(self.groups):
            self._wait(number)
            self._free(number)

    def _have(self, number: int, size: int) -> None:
        self.held[number] = size
        self.account.add(names.GATHERED, size)

    def _free(self, number: int) -> None:
        size = self.held.pop(number, None)
        if size is not None:
            self.account.add(names.GATHERED, -size)
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
