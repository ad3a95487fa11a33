"""What the command line asks for. Data only, and little: it is imported before anything is known."""

from dataclasses import dataclass, field
from pathlib import Path

from dsdoctor.core.build_models import Wish


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the command line asks of us. ``cache`` says whether compiled ops are taken from the cache and kept there;
    ``nodes`` are snapshots of the machines that the wheel is for."""

    python: str
    machine: Path | None = None
    source: str | None = None
    config: Path | None = None
    nodes: tuple[Path, ...] = ()
    wish: Wish = field(default_factory=Wish)
    cache: bool = True


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the user wants examined: this machine, or the snapshot ``machine``. ``deep`` asks the compiler too; ``rules`` empty
    means every check."""

    python: str
    machine: Path | None = None
    source: str | None = None
    rules: frozenset[str] = frozenset()
    deep: bool = False
    wish: Wish = field(default_factory=Wish)
