"""What the user names as a source, or an installed DeepSpeed -> its tree, its ops, and what each op needs."""
