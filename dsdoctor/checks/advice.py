"""Steps that several checks advise."""

from dsdoctor.core.finding import Step, step
from dsdoctor.core.machine import Cuda, Machine

WITH_WHEELS = tuple(map(Cuda.parse, ("11.8", "12.1", "12.4", "12.6", "12.8", "13.0")))
"""CUDA releases that torch has had wheels for (https://pytorch.org/get-started/previous-versions)."""


def other_torch(machine: Machine) -> Step:
    """Install another torch, pinned to a CUDA release that the driver here runs: an index has builds for several.

    Without a driver it is the release of the torch that is here; without that pip chooses.
    """
    torch, driver = machine.torch, machine.driver
    runs = (driver and driver.cuda) or (torch and torch.cuda)
    tag = next((tag_of(cuda) for cuda in reversed(WITH_WHEELS) if cuda and runs and cuda <= runs), None)
    python = machine.python.executable if machine.python else "python"
    if tag is None:
        return step("{python} -m pip install --upgrade torch", python=python)
    return step(
        "{python} -m pip install --upgrade torch --index-url https://download.pytorch.org/whl/{tag}",
        python=python,
        tag=tag,
    )


def same_torch(machine: Machine) -> Step:
    """Install the very torch that is here again, neither a newer one nor one for another CUDA release."""
    python = machine.python.executable if machine.python else "python"
    if machine.torch is None:
        return step("{python} -m pip install --force-reinstall torch", python=python)
    release, _, local = machine.torch.version.partition("+")
    if not local:
        return step("{python} -m pip install --force-reinstall torch=={release}", python=python, release=release)
    return step(
        "{python} -m pip install --force-reinstall torch=={release} --index-url https://download.pytorch.org/whl/{tag}",
        python=python,
        release=release,
        tag=local,
    )


def tag_of(cuda: Cuda) -> str:
    """How torch names a CUDA release.

    >>> tag_of(Cuda(12, 8))
    'cu128'
    """
    return f"cu{cuda.major}{cuda.minor}"
