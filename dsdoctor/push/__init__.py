"""One wheel to one node over ssh: the conversation with child_scripts/take_wheel.py there, and what became of it."""
