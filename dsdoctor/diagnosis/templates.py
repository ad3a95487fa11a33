"""A template of the catalogue and what was read -> a sentence, and the values for a step."""

import re
from collections.abc import Mapping

from dsdoctor.diagnosis.models import Facts

FIELD = re.compile(r"\{(\w+)(?:\|([^{}]*))?\}")
PACKAGES = {
    "dskernels": "deepspeed-kernels",
    "cpuinfo": "py-cpuinfo",
    "distutils": "setuptools",
    "setuptools": "setuptools",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "cv2": "opencv-python-headless",
    "lightning_fabric": "lightning",
}
LAUNCHER_PACKAGES = {"pdsh": "pdsh", "srun": "slurm-client", "mpirun_rsh": "mvapich2", "mpichversion": "mpich"}
LONGEST = 160
LAST_PORT = 65535


def fill(template: str, values: Mapping[str, str]) -> str:
    """Fill ``{name}`` or ``{name|text without it}``; ``{name_hint}`` is " (value)", or nothing.

    >>> fill("nvcc is CUDA {nvcc|another}, torch {torch}{arch_hint}", {"torch": "2.1.0", "arch": "sm_90"})
    'nvcc is CUDA another, torch 2.1.0 (sm_90)'
    """
    return FIELD.sub(lambda found: _value(found, values), template)


def placeholders(template: str) -> dict[str, str]:
    """A name in capitals for each field of a template that has no text of its own without a log.

    >>> placeholders("build {op} for {arch|all}{cuda_hint}")
    {'op': 'OP'}
    """
    fields = (found for found in FIELD.finditer(template) if found[2] is None and not found[1].endswith("_hint"))
    return {found[1]: found[1].upper() for found in fields}


def values_of(groups: Mapping[str, str], facts: Facts, op: str | None) -> dict[str, str]:
    """What templates may name: the facts, then what the line itself says, then names derived from them."""
    values = {name: value for name, value in vars(facts).items() if isinstance(value, str)}
    if op:
        values["op"] = op
    values |= {name: value[:LONGEST] for name, value in groups.items()}
    if "torch_extensions" not in values.get("cache", "") or ".." in values["cache"]:
        values.pop("cache", None)  # the fix moves this folder, so it must be the right one
    if cache := values.get("cache"):
        values["cache_aside"] = f"{cache.rstrip('/')}.old"
    if cuda := values.get("cuda"):
        values["cuda_dashed"] = cuda.replace(".", "-")
        values["cuda_tag"] = f"cu{cuda.replace('.', '')}"
    values |= _torch_again(values.get("torch", ""), values.get("cuda_tag"))
    if module := values.get("module"):
        values["package"] = PACKAGES.get(module.split(".")[0], module.split(".")[0].replace("_", "-"))
    if (port := values.get("port", "")).isdigit():
        values["other_port"] = str(int(port) + 1 if int(port) < LAST_PORT else int(port) - 1)
    if launcher := values.get("launcher"):
        values["launcher_package"] = LAUNCHER_PACKAGES.get(launcher, "openmpi-bin")
    return values


def _torch_again(torch: str, tag: str | None) -> dict[str, str]:
    """The torch of the log as a requirement, with the index that has it; nothing where the log does not say.

    >>> _torch_again("2.8.0+cu128", None)
    {'torch_requirement': 'torch==2.8.0', 'torch_index': 'https://download.pytorch.org/whl/cu128'}
    """
    release, _, local = torch.partition("+")
    if not release or not (local or tag):
        return {}
    return {"torch_requirement": f"torch=={release}", "torch_index": f"https://download.pytorch.org/whl/{local or tag}"}


def groups_of(found: re.Match[str]) -> dict[str, str]:
    """The named groups that matched; ``name2`` is another wording's ``name``.

    >>> groups_of(re.search("(?P<op>x)|(?P<op2>y)", "y"))
    {'op': 'y'}
    """
    return {name.rstrip("23456"): value for name, value in found.groupdict().items() if value}


def _value(found: re.Match[str], values: Mapping[str, str]) -> str:
    name, fallback = found[1], found[2]
    if name.endswith("_hint"):
        value = values.get(name.removesuffix("_hint"))
        return f" ({value})" if value else ""
    known = values.get(name)
    if known is None:
        return fallback if fallback is not None else "(unknown)"
    return known
