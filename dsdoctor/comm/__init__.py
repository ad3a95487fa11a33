"""Do the ranks reach each other, and say the same? Facts of each rank -> findings that name the rank, the host and the cause."""
