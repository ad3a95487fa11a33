"""A DeepSpeed wheel, or an installed DeepSpeed -> what is in it (ops, architectures, processor flags), and whether its ops load."""
