"""Under dsdoctor.run transformers' DebugUnderflowOverflow, which ``TrainingArguments(debug="underflow_overflow")`` makes, is ours.

If an engine is made of the same model later, its watch takes over: every module, every batch, and the training ends at the first
nan or inf that is no matter of the loss scale.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

MODULE = "transformers.debug_utils"
NAME = "DebugUnderflowOverflow"
OURS = "dsdoctor.overflow.watch.debug"


class GuideClass:
    """What was made in the place of transformers' class in this process."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._made: list[Any] = []
        self._is_said = False

    def replace(self, module: ModuleType) -> None:
        """Put ours in the place of transformers' class, before other modules take it from there."""
        if not hasattr(module, NAME):
            return
        try:
            ours = getattr(importlib.import_module(OURS), NAME)
        except ImportError as error:  # transformers without torch
            self._say(f"! transformers' {NAME} stays: {error}")
            return
        setattr(module, NAME, self._announced(ours))

    def _announced(self, ours: Any) -> Any:
        """A class that says what it is, and of which there is one for each model: a Trainer makes a new one in each ``train``."""
        mine = self

        class DebugUnderflowOverflow(ours):  # type: ignore[misc]
            __doc__ = ours.__doc__

            def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
                mine.end(lambda known: known is model)
                super().__init__(model, *args, **kwargs)
                if not mine._is_said:
                    mine._is_said = True
                    mine._say(f"dsdoctor's {NAME} watches in the place of transformers'")
                mine._made.append(self)

        DebugUnderflowOverflow.__qualname__ = NAME
        return DebugUnderflowOverflow

    def end(self, of: Callable[[Any], bool]) -> bool:
        """Detach those whose model is asked for. Returns whether there was one."""
        found = [each for each in self._made if of(each.model)]
        for each in found:
            each.detach()
            self._made.remove(each)
        return bool(found)

    def options_for(self, engine: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The options of the engine's watch: closer where the class watched one of its modules until now."""
        modules = set(engine.module.modules()) if self._made else set()
        if not self.end(lambda known: known in modules):
            return options
        level = "frames" if options.get("level", "guard") == "guard" else options["level"]
        self._say(
            f'! debug="underflow_overflow": the engine\'s watch takes over at level {level}, and ends the training at the first '
            "overflow that is no matter of the loss scale"
        )
        return {**options, "level": level, "on_overflow": "raise"}
