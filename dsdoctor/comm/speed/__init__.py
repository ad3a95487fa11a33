"""Times collectives, pairs and single ranks: formulas, what is slow, and what got slower since a baseline."""
