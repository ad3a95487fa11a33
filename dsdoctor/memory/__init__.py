"""A model, a DeepSpeed configuration and a number of ranks -> bytes per rank at each point of a step, and what to change."""
