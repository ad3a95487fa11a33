"""Pythons, releases of torch and of CUDA -> environments to build wheels for."""
