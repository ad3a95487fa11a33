"""A module -> what its forward and backward calls gave, batch by batch."""
