"""One wheel to one node over ssh: the conversation with inside/take_wheel.py there, and what became of it."""
