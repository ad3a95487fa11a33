"""Compiled ops and finished wheels, kept by content, taken only where every digest fits."""
