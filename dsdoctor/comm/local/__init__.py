"""The host of a rank: interfaces, limits, GPUs, versions; what differs between ranks, and what the links can do."""
