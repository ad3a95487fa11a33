import pickle
import sys

from . import part
from .part import Part


class Own:
    pass


print(__name__, __package__, __spec__.name, sys.argv[1:], part.__name__, pickle.loads(pickle.dumps(Part(2))))
print(Own.__module__, __file__.rsplit("/", 1)[-1], sys.path[0])
