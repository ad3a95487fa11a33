"""Inputs that nobody means, for every reader of what others wrote: see readers.py for what each is made of."""
