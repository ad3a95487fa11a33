"""The environment of a rank -> what all ranks of its run have in common: a key, where rank 0's supervisor listens, a secret.

Nothing is asked of the job's own store: it dies with rank 0, and its calls may wait.
"""

import hashlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TOKEN = "DSDOCTOR_HANG_TOKEN"  # noqa: S105 - the name of a variable
SAME_FOR_ALL = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
FIRST_PORT, PORTS, TRIES = 20_000, 12_000, 8
"""Below those that the kernel gives to outgoing connections (32768 and above)."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """``key`` names the run; ``secret`` proves that a message is of it. Without DSDOCTOR_HANG_TOKEN the secret is made of
    what launchers tell every rank, so it keeps runs apart, and keeps out only those who do not know the job."""

    key: str
    master: str
    ports: tuple[int, ...]
    secret: bytes


def identity(environment: Mapping[str, str], *, user: int, place: str = "") -> RunIdentity | None:
    """None where no launcher said where rank 0 is. ``place``: an address given to torch itself."""
    master = environment.get("MASTER_ADDR") or place
    if not master:
        return None
    known = [f"{name}={environment.get(name, '')}" for name in SAME_FOR_ALL]
    base = "\n".join(["dsdoctor hang", str(user), place if "MASTER_ADDR" not in environment else "", *known])
    digest = hashlib.sha256(base.encode(errors="replace")).digest()
    secret = hashlib.sha256(digest + environment.get(TOKEN, "").encode(errors="replace")).digest()
    start = int.from_bytes(digest[:4], "big")
    ports = tuple(FIRST_PORT + (start + 97 * number) % PORTS for number in range(TRIES))
    return RunIdentity(key=secret.hex()[:12], master=master, ports=ports, secret=secret)


def node_name() -> str:
    """This node: its name, and which process numbers are meant, where containers share a name."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink()).strip("pid:[]")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}/{namespace}"


def node_folder(key: str, *, user: int, bases: tuple[str, ...] = ("/dev/shm", "/tmp")) -> Path:
    """A private folder of this run on this node. Raises OSError where none can be made."""
    tag = hashlib.sha256(node_name().encode(errors="replace")).hexdigest()[:6]
    failure: OSError = FileNotFoundError("no place for shared memory")
    for base in bases:
        try:
            outer = Path(base) / f"dsdoctor-hang-{user}"
            _private(outer, user)
            _private(outer / f"{key}-{tag}", user)
            return outer / f"{key}-{tag}"
        except OSError as error:
            failure = error
    raise failure


def _private(folder: Path, user: int) -> None:
    """Make a folder that is this user's alone; one of somebody else, or a link, is refused."""
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if folder.is_symlink() or state.st_uid != user or state.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone")
