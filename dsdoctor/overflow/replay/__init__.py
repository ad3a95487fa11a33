"""A bad batch, run again under a recorder -> the operation and the line that made the first bad value."""
