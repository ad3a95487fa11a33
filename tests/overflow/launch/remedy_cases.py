"""Where a model overflows in float16, and the module in which float32 helps. Imports no torch."""

import itertools
from typing import Any

HELPS = {"inside": "blocks.1.squares", "leaks": "blocks.1", "half": None, "log": ""}
"""What is planted: squares that do not fit while their mean does; an output that does not fit what comes after it in the same
block; a cast to half within, which makes float32 vain; a logarithm of a chance that is nothing in float16, of the whole model."""

CASES: dict[str, dict[str, Any]] = {
    f"{plant}, stage {stage}{', rank 1' if only else ''}": {
        "plant": plant,
        "stage": stage,
        "dtype": "fp16",
        "only": only,
        "power": 8,
    }
    for plant, (stage, only) in itertools.product(HELPS, ((1, None), (2, 1), (3, None)))
}
