"""A wheel, or an installed one -> what is in it: ops, architectures, processor flags; and whether it loads."""
