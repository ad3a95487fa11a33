"""dsdoctor gets DeepSpeed built and keeps it running right. Importing it imports neither torch nor deepspeed."""

__version__ = "0.1.0"
