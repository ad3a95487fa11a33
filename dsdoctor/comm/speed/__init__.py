"""Collectives, pairs and paces timed: formulas, what is slow, what got slower since."""
