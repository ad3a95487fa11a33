"""Which ranks reach each other over plain TCP."""
