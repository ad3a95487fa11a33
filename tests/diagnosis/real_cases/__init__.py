"""What `tests/diagnosis/make.py` runs: each module holds one tuple of cases, each a training script that fails, or does not."""
