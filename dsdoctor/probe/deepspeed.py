"""Host + environment -> the installed DeepSpeed, read from ``git_version_info_installed.py`` as data."""

from dsdoctor.answers import parse_version_info
from dsdoctor.host import Host
from dsdoctor.machine import DeepSpeed
from dsdoctor.probe.python import Environment


def read_deepspeed(host: Host, environment: Environment | None) -> DeepSpeed | None:
    """The DeepSpeed of an environment; None when there is none."""
    if environment is None or environment.deepspeed is None:
        return None
    location = environment.deepspeed
    facts = parse_version_info(host.read(f"{location}/git_version_info_installed.py") or "")
    torch = facts.get("torch_info")
    built_with = torch if isinstance(torch, dict) else {}
    ops = facts.get("installed_ops")
    return DeepSpeed(
        version=str(facts.get("version") or environment.python.packages.get("deepspeed") or "unknown"),
        location=location,
        accelerator=str(facts["accelerator_name"]) if facts.get("accelerator_name") else None,
        torch=str(built_with["version"]) if "version" in built_with else None,
        cuda=str(built_with["cuda_version"]) if "cuda_version" in built_with else None,
        installed_ops=tuple(sorted(name for name, on in ops.items() if on)) if isinstance(ops, dict) else (),
    )
