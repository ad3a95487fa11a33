"""``python -m dsdoctor.run``: an unmodified training script, under the watch."""
