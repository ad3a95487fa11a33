"""Host -> the variables that steer communication, as NCCL itself would see them (its files too). Never secrets."""

import re
from collections.abc import Iterator

from dsdoctor.core.host import Host
from dsdoctor.core.redaction import urls

PREFIXES = (
    *("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED", "TORCH_FR_", "UCX_"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)
FILES = ("~/.nccl.conf", "/etc/nccl.conf")
"""Where NCCL looks, in this order; NCCL_CONF_FILE replaces the first. What is set already is not overwritten (initEnv)."""

NOT_SECRET = ("NCCL_IB_PKEY",)
"""An index in a port's table of partitions."""

SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
SECRET_VALUE = re.compile(r"\S:\S*@|\bBearer |\b(?:ghp|gho|hf|sk|xox[abp])[-_]\w{10,}|\bAKIA[0-9A-Z]{8,}")


def is_secret(name: str, value: str) -> bool:
    """Whether a variable must not be sent to other hosts or shown.

    >>> is_secret("NCCL_X_TOKEN", "1"), is_secret("NCCL_ALGO", "http://u:p@proxy"), is_secret("NCCL_ALGO", "Ring")
    (True, True, False)
    """
    return (name not in NOT_SECRET and SECRET_NAME.search(name) is not None) or SECRET_VALUE.search(value) is not None


def read_variables(host: Host) -> dict[str, str]:
    """The environment's variables, and those of NCCL's files that the environment does not set."""
    found: dict[str, str] = {}
    for path in _files(host):
        for name, value in parse_conf(host.read(path) or ""):
            found.setdefault(name, value)
    for prefix in PREFIXES:
        found.update(host.variables(prefix))
    return {name: urls(value) for name, value in sorted(found.items()) if not is_secret(name, value)}


def read_config_files(host: Host) -> tuple[str, ...]:
    """NCCL's files that are here, each setting in them as "path: NAME=value"."""
    said = []
    for path in _files(host):
        said_here = parse_conf(host.read(path) or "")
        settings = [(name, urls(value)) for name, value in said_here if not is_secret(name, value)]
        said += [f"{path}: {name}={value}" for name, value in settings] or ([path] if host.exists(path) else [])
    return tuple(said)


def parse_conf(text: str) -> Iterator[tuple[str, str]]:
    """The settings of an nccl.conf.

    >>> list(parse_conf("# ours\\nNCCL_IB_DISABLE=1\\nno setting\\nNCCL_SOCKET_IFNAME==eth0\\n"))
    [('NCCL_IB_DISABLE', '1'), ('NCCL_SOCKET_IFNAME', '=eth0')]
    """
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and name.startswith("NCCL_"):
            yield name.strip(), value.strip()


def _files(host: Host) -> tuple[str, ...]:
    home = host.variable("HOME")
    own = host.variable("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home else None)
    return (own, FILES[1]) if own else (FILES[1],)
