"""Whose code a file is: the user's own, an installed package's, or of what runs a training: Python, torch, DeepSpeed, dsdoctor.

By its path alone: a stack may be of another machine. What is in no file (`<string>`) is nobody's, but for what a user typed.
"""

import functools
import re
import sysconfig

PYTHON = re.compile(r"/lib(64)?/python3(\.\d+t?)?/(?!(site|dist)-packages/)|/python3\d+\.zip/")
INSTALLED = re.compile(r"/(site|dist)-packages/")
ROOMS = "checkpoint|checks|child_scripts|cli|comm|config|core|diagnosis|hang|hosts|memory|overflow|probe|ranks|run|ui"
TORCH = re.compile(
    r"/(site|dist)-packages/torch/"
    r"|/torch/((distributed|utils|nn|optim|autograd|amp|fx|func|compiler|cuda|jit|ao|_\w+)/|(functional|overrides|library|serialization|_\w+)\.py$)"
)
MACHINERY = re.compile(rf"/deepspeed/(runtime|utils|comm)/|/dsdoctor/({ROOMS})/")
"""Of DeepSpeed what calls a model, gathers its parameters or stands in for torch's functions."""
OF_DEEPSPEED = re.compile(r"/deepspeed/((ops|pipe|moe|sequence|accelerator|checkpoint)/|__init__\.py$)")
"""Layers and the like: a model's code, and not the user's own."""
STDLIB = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
"""Where this Python's own library is, which need not look like one. Asked here: sysconfig imports when it is asked, and a thread
that watches must not."""
CHECKPOINT_WATCH = "_dsdoctor_checkpoint"
"""The attribute of an engine's load_checkpoint and save_checkpoint where dsdoctor.run watches them."""
TYPED = ("<stdin>", "<ipython-input-")


@functools.lru_cache(maxsize=4096)
def is_machinery(file: str) -> bool:
    """Whether code only runs a model, and is none: Python's own, torch's, DeepSpeed's engine, dsdoctor's.

    >>> files = "/home/me/train.py", "/v/lib/python3.11/site-packages/transformers/trainer.py", "<stdin>"
    >>> [is_machinery(file) for file in files]
    [False, False, False]
    >>> files = "/v/lib/python3.11/queue.py", "/x/deepspeed/runtime/zero/linear.py", "<frozen runpy>", "/src/torch/nn/functional.py"
    >>> [is_machinery(file) for file in files]
    [True, True, True, True]
    """
    if file.startswith("<"):
        return not file.startswith(TYPED)
    if file.startswith(STDLIB) and INSTALLED.search(file) is None:
        return True
    return any(pattern.search(file) is not None for pattern in (PYTHON, TORCH, MACHINERY))


def is_user_file(file: str) -> bool:
    """Whether code is the user's own: neither machinery nor an installed package.

    >>> files = "/home/me/train.py", "/v/lib/python3.11/site-packages/transformers/trainer.py", "/x/deepspeed/moe/layer.py"
    >>> [is_user_file(file) for file in files]
    [True, False, False]
    """
    return not is_machinery(file) and INSTALLED.search(file) is None and OF_DEEPSPEED.search(file) is None
