"""The hang watch as a callback of Hugging Face's Trainer: ``Trainer(..., callbacks=[dsdoctor.HangCallback()])``."""

from typing import Any

import transformers

from dsdoctor.run.in_code import watch_hangs

TrainerCallback: Any = transformers.TrainerCallback


class Steps:
    """Trainer's count of steps, as DeepSpeed's engines hold theirs: the watch reads what an object holds and runs none of its
    code."""

    def __init__(self) -> None:
        self.global_steps = 0


class HangCallback(TrainerCallback):  # type: ignore[misc]
    """Watches every rank of a Trainer from the begin of its training on. The options are those of ``dsdoctor.watch_hangs``."""

    def __init__(self, **options: Any) -> None:
        self._options: dict[str, Any] | None = options
        self._steps = Steps()

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Begin, once."""
        self._steps.global_steps = int(state.global_step)
        if self._options is not None:
            watch_hangs(self._steps, **self._options)
            self._options = None

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Tell the watch of the step."""
        self._steps.global_steps = int(state.global_step)
