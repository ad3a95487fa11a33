"""What surrounds a rank: interfaces, limits, GPUs, versions; what differs between ranks, what the links can do."""
