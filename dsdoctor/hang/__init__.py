"""A running training -> who does not come, where it stands and why: a look in each rank, one supervisor a node, a judge."""
