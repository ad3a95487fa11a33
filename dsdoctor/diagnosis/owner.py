"""Whose a place in a traceback is: a project's, Python's or the user's own; and whether it only passes on what others raise.

"Not below site-packages" is no test of the user's own code: training frameworks run from clones, and a console script such as
``/usr/local/bin/trl`` belongs to its package.
"""

import re
from functools import lru_cache

from dsdoctor.rules.store import Table, form, forms

PYTHON = "Python"

DSDOCTOR = "dsdoctor"

REMOTE_CODE = "the model's own code"  # what a library downloaded with a model and runs (trust_remote_code)
INSTALLED = re.compile(r"(?:site|dist)-packages[/\\](?:(?P<package>[^/\\]{1,80})[/\\]|(?P<module>[^/\\.]{1,80}))")

STANDARD_LIBRARY = re.compile(
    r"^<(?!ipython-input)|[/\\]lib(?:64)?[/\\]python3(?:\.\d{1,2})?[/\\](?!(?:site|dist)-packages)|\.p(?:yx|xi)$"
)

CONSOLE_SCRIPT = re.compile(r"[/\\](?:s?bin|Scripts)[/\\](?P<name>[A-Za-z][\w-]{0,60})$")

TITLES: Table = forms("projects")["titles"]
"""The packages that also run from a clone, and what their projects are called where that differs from the package's name."""

LIBRARIES = frozenset(forms("projects")["libraries"])
"""Libraries that only pass a value on: what they got, a program above them has chosen."""

CLONED, RELAYS = form("projects", "cloned"), form("projects", "relay")

DOWNLOADED = re.compile(r"[/\\]\.cache[/\\](?:huggingface|modelscope)[/\\]|[/\\]transformers_modules[/\\]")

GENERATED = re.compile(
    r"[/\\](?P<package>[a-z]\w{1,30})_compiled_cache[/\\]"
)  # code that a package writes, and runs, beside the script

OWN_TOOL = re.compile(r"[/\\]dsdoctor[/\\](?:overflow|run|memory|hang|checkpoint)[/\\]")


@lru_cache(maxsize=4096)
def owner_of(path: str) -> str:
    """The project that a file belongs to, ``Python``, or "" for the user's own.

    >>> owner_of("/v/lib/python3.11/site-packages/flash_attn/ops.py"), owner_of("/usr/lib/python3.10/json/decoder.py")
    ('flash-attn', 'Python')
    >>> owner_of("/root/LLaMA-Factory/src/llamafactory/train/tuner.py"), owner_of("/w/verl/trainer/main_ppo.py")
    ('LLaMA-Factory', 'verl')
    >>> owner_of("/w/unsloth_compiled_cache/UnslothSFTTrainer.py")
    'unsloth'
    >>> owner_of("/usr/local/bin/trl"), owner_of("/home/verl/train.py"), owner_of("/w/deepspeed/train.py"), owner_of("train.py")
    ('TRL', '', '', '')
    """
    if OWN_TOOL.search(path):
        return DSDOCTOR
    if found := INSTALLED.search(path):
        return title_of(found["package"] or found["module"])
    if STANDARD_LIBRARY.search(path):
        return PYTHON
    if DOWNLOADED.search(path):
        return REMOTE_CODE
    if found := GENERATED.search(path):
        return title_of(found["package"])
    if found := CONSOLE_SCRIPT.search(path):
        return title_of(found["name"].replace("-", "_"))
    if found := CLONED.search(path):
        package = found["package"] or found["below_src"]
        return (
            title_of(package) if package else str(TITLES.get(found["clone"].lower().replace("-", "_"), found["clone"]))
        )
    return ""


def title_of(package: str) -> str:
    """What the project of a package is called."""
    return str(TITLES.get(package, package))


@lru_cache(maxsize=4096)
def is_relay(path: str, function: str) -> bool:
    """Whether a place only passes on an exception of somebody else.

    >>> ray = "/v/site-packages/ray/_private/worker.py"
    >>> is_relay(ray, "get_objects"), is_relay(ray, "init")
    (True, False)
    """
    place = f"{path}:{function.rpartition('.')[2]}".replace("\\", "/")
    return RELAYS.search(place) is not None or CONSOLE_SCRIPT.search(path) is not None
