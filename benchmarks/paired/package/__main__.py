from .train import Part

print(__name__, __package__, __spec__.name, Part())
