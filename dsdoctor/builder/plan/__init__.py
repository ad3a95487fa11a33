"""A machine, a DeepSpeed source and a request -> a build plan, every choice with its reason. Pure."""
