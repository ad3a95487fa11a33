"""Autograd notes the lines of the operations between a model's forward and its backward: a switch of torch, on only while a loss
that was nan or inf is expected again, because it costs some fifty microseconds an operation. Changes no value.
"""

import torch

MOST = 100
"""Forwards after a bad loss in which its line is looked for."""


class LossLines:
    """The switch. One for the process, as torch's is. It stays ``is_on`` where the script has set its own meanwhile: torch's
    ``detect_anomaly`` puts back what it found, which is this one, and that is to be switched off at the next call of ``end``.
    """

    is_on = False
    left_to_script = False

    @classmethod
    def begin(cls) -> None:
        """The model's forward is over. Nothing where the script has switched it on by itself, now or at any time before."""
        if not cls.left_to_script and not torch.is_anomaly_enabled():
            torch.autograd.set_detect_anomaly(True, check_nan=False)
            cls.is_on = True

    @classmethod
    def end(cls) -> None:
        """The backward begins, or another forward, or the step is over. What looks for nan is the script's own, and stays."""
        if not cls.is_on:
            return
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            cls.left_to_script = True
            return
        cls.is_on = False
        torch.autograd.set_detect_anomaly(False)
