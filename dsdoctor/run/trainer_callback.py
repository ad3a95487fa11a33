"""The hang watch as a callback of Hugging Face's Trainer: ``Trainer(..., callbacks=[dsdoctor.HangCallback()])``."""

from typing import Any

import transformers

from dsdoctor.run.hang_in_code import watch_hangs

TrainerCallback: Any = transformers.TrainerCallback


class Steps:
    """Trainer's count of steps, as DeepSpeed's engines call it."""

    def __init__(self, state: Any) -> None:
        self._state = state

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far."""
        return int(self._state.global_step)


class HangCallback(TrainerCallback):  # type: ignore[misc]
    """Watches every rank of a Trainer from the begin of its training on. The options are those of ``dsdoctor.watch_hangs``."""

    def __init__(self, **options: Any) -> None:
        self._options: dict[str, Any] | None = options

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Begin, once."""
        if self._options is not None:
            watch_hangs(Steps(state), **self._options)
            self._options = None
