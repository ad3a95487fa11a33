"""Hostfiles, node lists and the words of ssh -> hosts, and what is the matter with one."""
