"""A DeepSpeed engine or a model -> a watch on it, told from attaching to the last step."""
