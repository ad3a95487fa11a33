"""What releases of DeepSpeed read in a ds_config.json -> dsdoctor/config/releases.json, asked of each release itself.

    python ci/write_config_releases.py             adds the releases that PyPI has and the file lacks (network, a minute each ten)
    python ci/write_config_releases.py 0.19.8      asks these anew

Needs torch. Releases before 0.15.1 do not import beside a current torch.
"""

import json
import subprocess
import sys

import msgspec

from dsdoctor.builder.source.fetch import lay_out
from dsdoctor.config.answer import Asked, Request, ask
from dsdoctor.config.releases import FILE, pack, recorded, versions
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Gap
from dsdoctor.core.workspace import cache_folder, private_folder, workspace

OLDEST = (0, 15, 1)


def numbers(version: str) -> tuple[int, ...]:
    """The parts of a version, to sort by."""
    return tuple(int(part) for part in version.split("."))


def published() -> list[str]:
    """The releases on the package index, as pip finds it."""
    argv = [sys.executable, "-m", "pip", "index", "versions", "deepspeed", "--json"]
    every = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)["versions"]
    return [version for version in every if numbers(version) >= OLDEST]


def asked_of(version: str) -> Asked | None:
    """The answer of a release whose sdist is fetched and unpacked for it; None where it gives none."""
    host = LocalHost()
    with workspace(private_folder(cache_folder(host))) as place:
        laid = lay_out(host, version, place / "source", cache=cache_folder(host), python=sys.executable, offline=False)
        answer = ask(host, sys.executable, Request(config=None, source=str(laid.folder)), accelerator="cuda")
    if isinstance(answer, Gap):
        sys.stderr.write(f"{version}: {answer.reason}\n")
        return None
    return answer


def main() -> None:
    """Ask, and write the whole file."""
    known = {version: recorded(version) for version in versions()} if FILE.exists() else {}
    for version in sys.argv[1:] or [each for each in published() if each not in known]:
        if answer := asked_of(version):
            known[version] = answer
    ordered = {version: known[version] for version in sorted(known, key=numbers)}
    FILE.write_bytes(msgspec.json.encode(pack(ordered)) + b"\n")


if __name__ == "__main__":
    main()
