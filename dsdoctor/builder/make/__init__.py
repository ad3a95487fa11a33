"""A build plan -> compiled ops, one wheel, and the proof of it."""
