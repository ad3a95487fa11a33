"""A build plan -> compiled ops, and one wheel whose ops were checked to load."""
