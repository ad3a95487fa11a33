import copy
import dataclasses
import enum
import inspect
import io
import pickle
import pickletools
from typing import NamedTuple, get_type_hints


@dataclasses.dataclass(frozen=True)
class Arguments:
    rate: float = 0.1
    layers: "list[Layer]" = dataclasses.field(default_factory=list)


class Layer(enum.Enum):
    FIRST = 1


class Point(NamedTuple):
    x: int


def double(value):
    """Twice."""
    return value * 2


class Net:
    def forward(self):  # a comment
        return 1


held = [Arguments(layers=[Layer.FIRST]), Point(3), double, Net]
data = pickle.dumps(held)
print(pickle.loads(data), get_type_hints(Arguments), copy.deepcopy(held[0]) == held[0])
out = io.StringIO()
pickletools.dis(data, out)
print(out.getvalue())
print(inspect.getsource(double), inspect.getsource(Net), inspect.getsource(Net.forward), inspect.getfile(Net))
print(inspect.getmodule(Net), inspect.getsourcelines(Arguments)[1], inspect.stack()[0].function, len(inspect.stack()))
print(inspect.getmodule(inspect.currentframe()), double.__globals__ is globals(), double.__module__)
with open("held.pickle", "wb") as file:
    file.write(data)
