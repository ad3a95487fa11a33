"""Which modules to run in fp32, given the tensors that exceed a limit: few names, and none too few. Pure."""

from collections.abc import Iterable

from dsdoctor.overflow.frames.frame import Frame, TensorStats


class Excess:
    """The modules that hold or make a tensor above a limit, collected frame by frame.

    A leaf counts with each of its tensors. A module with children only counts for a tensor that none of its children had in
    this batch: a residual sum, for instance. What it merely passes on is its children's affair.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.modules: dict[str, None] = {}
        self.leaking: set[str] = set()
        self._batch: dict[int, int] = {}
        self._seen: dict[int, dict[tuple[float, tuple[int, ...]], set[str]]] = {}

    def add(self, rank: int, frame: Frame, tensor: TensorStats, value: float) -> None:
        """Note a tensor of a forward frame whose largest value exceeds; children's frames come before their parents'."""
        if self._batch.get(rank) != frame.batch:
            self._batch[rank], self._seen[rank] = frame.batch, {}
        if tensor.name.startswith("output"):
            self.leaking.add(frame.module)
        holders = self._seen[rank].setdefault((value, tensor.shape), set())
        inside = any(is_inside(one, frame.module) for one in holders)
        if frame.module not in self.modules and not inside:
            self.modules[frame.module] = None
        holders.add(frame.module)


def is_inside(module: str, outer: str) -> bool:
    """Whether a module is a part of another, by their names.

    >>> is_inside("h.1.mlp", "h.1"), is_inside("h.10", "h.1"), is_inside("h.1", ""), is_inside("h.1", "h.1")
    (True, False, True, False)
    """
    return module != outer and (not outer or module.startswith(f"{outer}."))


def fp32_list(excess: Excess, order: Iterable[str], bad: Iterable[str], *, cast_back: bool) -> tuple[str, ...]:
    """The names to keep in fp32, in the order of execution, none inside of another.

    ``bad``: modules that made a nan or an inf. ``cast_back``: a module that is kept in fp32 gives its output back in
    the low precision, so an output that exceeds must not leave: the nearest enclosing module is taken whose own outputs fit.
    """
    known = list(order)
    names = dict.fromkeys([*excess.modules, *bad])
    if cast_back:
        names = dict.fromkeys(_enclosing(name, excess.leaking, set(known)) for name in names)
    outermost = [name for name in names if not any(is_inside(name, other) for other in names)]
    return tuple(sorted(outermost, key=known.index))


def _enclosing(name: str, leaking: set[str], known: set[str]) -> str:
    """The module itself or the nearest one around it whose outputs fit; the outermost that was traced where none does."""
    found = name
    while found in leaking and name:
        name = name.rpartition(".")[0]
        if name in known:
            found = name
    return found
