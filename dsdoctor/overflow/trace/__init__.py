"""Trace files -> frames, and what can be asked of them: a selection, the first difference, the headroom, the trend."""
