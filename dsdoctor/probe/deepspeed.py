"""Host + environment -> the installed DeepSpeed, read from what it says of itself, as data."""

import glob

from dsdoctor.core.deepspeed_install import (
    MANIFEST,
    RECORD,
    deepspeed_of_record,
    with_libraries,
    with_manifest,
    with_tags,
)
from dsdoctor.core.host import Host
from dsdoctor.core.machine import DeepSpeed
from dsdoctor.probe.python import Environment


def read_deepspeed(host: Host, environment: Environment | None) -> DeepSpeed | None:
    """The DeepSpeed of an environment; None when there is none."""
    if environment is None or environment.deepspeed is None:
        return None
    location = environment.deepspeed
    version = environment.python.packages.get("deepspeed") or "unknown"
    facts = deepspeed_of_record(host.read(f"{location}/{RECORD}") or "", version=version, location=location)
    if facts.installed_ops:
        facts = with_libraries(facts, host.glob(f"{glob.escape(location)}/**/*.so"))
    information = f"{glob.escape(location.rsplit('/', 1)[0])}/deepspeed-{glob.escape(version)}.dist-info"
    manifest, wheel = (
        next((host.read(path) for path in host.glob(f"{information}/{name}")), None) for name in (MANIFEST, "WHEEL")
    )
    return with_tags(with_manifest(facts, manifest, exists=host.exists), wheel)
