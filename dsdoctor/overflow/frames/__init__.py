"""The data of a watched batch: frames, and the first bad value among them. Without torch."""
