"""Pythons and releases of torch -> environments to build for."""
