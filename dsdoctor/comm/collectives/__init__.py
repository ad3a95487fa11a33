"""Collectives with values: what they must give, whose data is wrong, which rank hangs, what NCCL says."""
