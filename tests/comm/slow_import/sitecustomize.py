"""Holds every import of torch until a file is there: what a network file system does that is slow."""

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class Held(importlib.abc.MetaPathFinder):
    """Finds nothing, after a while."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        while name == "torch" and not Path(os.environ["TORCH_IS_READ"]).exists():
            time.sleep(0.02)
        return None


sys.meta_path.insert(0, Held())
