"""Sends a wheel to a node over ssh, talks to child_scripts/take_wheel.py there, and returns the outcome."""
