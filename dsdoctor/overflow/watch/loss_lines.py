"""Autograd notes the lines of the operations between a model's forward and its backward: a switch of torch, on only while a loss
that was nan or inf is expected again, because it costs some fifty microseconds an operation. Changes no value.
"""

import torch

MOST = 100
"""Forwards after a bad loss in which its line is looked for."""


class LossLines:
    """The switch. One for the process, as torch's is."""

    is_on = False

    @classmethod
    def begin(cls) -> None:
        """The model's forward is over. Where the script has switched it on by itself nothing changes."""
        if not torch.is_anomaly_enabled():
            torch.autograd.set_detect_anomaly(True, check_nan=False)
            cls.is_on = True

    @classmethod
    def end(cls) -> None:
        """The backward begins, or another forward."""
        if cls.is_on:
            cls.is_on = False
            torch.autograd.set_detect_anomaly(False)
