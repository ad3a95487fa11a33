"""The last lines before the ranks waited -> that the loss had fallen to exactly 0.0: the training was broken before it hung."""

import re

from dsdoctor.diagnosis.clean import last_segment

LOSS = re.compile(
    rb"['\"]?\b(?:lm[_ ])?loss['\"]?\s{0,3}[:=]\s{0,3}['\"]?(\d{1,9}(?:\.\d{1,20})?(?:[eE][+-]?\d{1,3})?)(?![\d.])"
)
OF_A_REWARD = re.compile(rb"reward|\bkl\b|advantage|completion_length|completions/|clip_ratio")
"""Words of lines of reinforcement learning, where a loss of 0 is nothing strange."""

PLAUSIBLE = 1.0
"""A loss from which a training seldom falls to what is printed as zero within a log line."""


def loss_of_zero(raws: list[bytes]) -> str:
    """What is told of a loss that was a plausible one, and then exactly zero up to the last line that has one; "" otherwise.

    >>> loss_of_zero([b"{'loss': 3.5534, 'epoch': 0.01}", b"{'loss': 0.0, 'epoch': 0.01}"])
    "the loss was printed as 0.0 before, and 3.5534 before that: learning may have broken down (labels that are all \
masked, a kernel or weights that give nan); that may be the cause of both: {'loss': 0.0, 'epoch': 0.01}"
    >>> loss_of_zero([b"{'loss': 3.5534}", b"{'loss': 0.0}", b"{'loss': 2.1}"])
    ''
    """
    told = [(found[1], raw) for raw in raws if (found := LOSS.search(raw[-600:])) and not OF_A_REWARD.search(raw)]
    if not told or float(told[-1][0]) != 0:
        return ""
    before = next((value for value, _ in reversed(told) if float(value) != 0), None)
    if before is None or float(before) < PLAUSIBLE:
        return ""
    return (
        f"the loss was printed as {told[-1][0].decode()} before, and {before.decode()} before that: learning may have broken down "
        "(labels that are all masked, a kernel or weights that give nan); that may be the cause of both: "
        f"{last_segment(told[-1][1])[:160]}"
    )
