"""Tests the communication between ranks: facts of each rank -> findings that name the rank, the host and the cause."""
