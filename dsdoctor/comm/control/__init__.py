"""Runs a test: the processes of a rank, rank 0's orders, the phases, the report."""
