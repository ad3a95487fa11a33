"""dsdoctor's version: the one place where it stands. setup.py reads this file as text."""

__version__ = "0.2.0"
