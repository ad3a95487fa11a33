"""Collectives on known values: the expected result, whose data is wrong, which rank hangs, what NCCL logs."""
