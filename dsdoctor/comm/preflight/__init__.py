"""Checks before a rank is started: the hostfile, every host over ssh, what a launcher forwards."""
