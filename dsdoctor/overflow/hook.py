"""A hook on a module that stays with that module: a copy of the module, or a saved one, has a hook that does nothing."""

from collections.abc import Callable
from typing import Any


class Hook:
    """Calls ``function``. Copied or pickled, it calls nothing: an average or a checkpoint of a model is not watched."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "Hook":
        return Hook(nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (nothing,)


def nothing(*_: Any, **__: Any) -> None:
    """What the hook of a copy does."""
