"""A DeepSpeed configuration, and what an installed DeepSpeed answers about it -> findings, and a corrected file."""
