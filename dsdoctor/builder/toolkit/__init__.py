"""A machine -> a CUDA_HOME that fits its torch, chosen or assembled; and Python's headers where they are missing."""
