from dataclasses import dataclass


@dataclass
class Part:
    n: int = 1
