"""A folder of DeepSpeed checkpoints -> what is in it, findings, and whether a planned run loads it. No torch, nothing unpickled."""
