"""The signatures of known failures, one file a topic, and their rules."""
