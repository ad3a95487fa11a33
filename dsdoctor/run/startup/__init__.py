"""A folder for PYTHONPATH: it holds a sitecustomize.py and nothing else that could be imported by name."""
