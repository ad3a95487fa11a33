"""What Debian and Ubuntu package, fetched by apt without root and unpacked, not installed: nvidia-cuda-toolkit, and Python.h.

For the toolkit apt works under a configuration of its own in dsdoctor's cache folder: the mirrors are the system's, the suites
those that hold a CUDA compiler, signatures are checked with the distribution's keyring, nothing of the system's apt is changed.
Headers are those of the system's Python alone, which belong in /usr/include: any other Python has no such package.
"""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock

from dsdoctor.builder.toolkit.download import Meter, Say, shown
from dsdoctor.core.build_models import Choice, DebianPackage, HeadersPlan
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.files import sha256_of, write_text
from dsdoctor.core.finding import Finding, Severity, step
from dsdoctor.core.host import Host, LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.pip import why_failed
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.workspace import private_folder
from dsdoctor.rules import book

PACKAGE = "nvidia-cuda-toolkit"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
ANSWER_TIMEOUT_SECONDS = 30.0
"""Seconds for a question to apt, also one that goes over the network: check waits for it where a firewall swallows everything."""

UNPACK_TIMEOUT_SECONDS = 600.0
MAX_MIRRORS = 2
# a line of #clear takes back what the system's apt.conf.d says: its hooks would change the system's own cache
CONFIGURATION = """\
Dir::State "{folder}/state";
Dir::State::status "/dev/null";
Dir::Cache "{folder}/cache";
Dir::Log "{folder}/log";
Dir::Etc::SourceList "{folder}/private.sources";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
APT::Architecture "{architecture}";
#clear APT::Architectures;
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear APT::Default-Release;
APT::Sandbox::User "root";
APT::Get::AllowUnauthenticated "false";
Acquire::AllowInsecureRepositories "false";
Acquire::AllowWeakRepositories "false";
Acquire::AllowDowngradeToInsecureRepositories "false";
Acquire::Languages "none";
Acquire::http::Timeout "10";
Acquire::https::Timeout "10";
"""

SOURCES = """\
Types: deb
URIs: {address}
Suites: {suites}
Components: {component}
Architectures: {architecture}
Targets: Packages
Signed-By: {keyring}
"""


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Where a distribution has the compiler. ``suites`` are those with CUDA 11.8 and later that stay on its mirrors."""

    name: str
    identity: str
    keyrings: tuple[str, ...]
    component: str
    suites: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A distribution's archive as this system is set up to reach it. ``keyring`` is the file that checks its signatures."""

    distribution: Distribution
    address: str
    keyring: str


DISTRIBUTIONS = (
    Distribution(
        name="Debian",
        identity="debian",
        keyrings=("/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.pgp"),
        component="non-free",
        suites=("trixie", "bookworm"),
    ),
    Distribution(
        name="Ubuntu",
        identity="ubuntu",
        keyrings=("/usr/share/keyrings/ubuntu-archive-keyring.gpg",),
        component="multiverse",
        suites=("resolute", "noble"),
    ),
)


def find_mirrors(host: Host) -> tuple[Mirror, ...] | str:
    """The mirrors of the distribution that this system uses, likeliest first; else why there is none."""
    apt_get = host.which("apt-get")
    if apt_get is None or host.which("dpkg-deb") is None:
        return "there is no apt-get and dpkg-deb here"
    kinds = parse_kinds(host.search("/etc/os-release", r"^(?:ID|ID_LIKE)=.*$"))
    known = {distribution.identity: distribution for distribution in DISTRIBUTIONS}
    for distribution in (known[kind] for kind in kinds if kind in known):
        keyring = next((path for path in distribution.keyrings if host.exists(path)), None)
        if keyring is None:
            continue
        # it fetches nothing, needs no root, and knows the mirrors also where an image has thrown the lists away
        listed = host.run([apt_get, "update", "--print-uris"], timeout=ANSWER_TIMEOUT_SECONDS)
        addresses = parse_targets(listed.stdout)
        if not addresses:
            return f"apt here has no mirror of {distribution.name}"
        return tuple(
            Mirror(distribution=distribution, address=found, keyring=keyring) for found in addresses[:MAX_MIRRORS]
        )
    return "this is neither Debian nor Ubuntu with its keyring"


def parse_kinds(text: str) -> tuple[str, ...]:
    """What a system is, and what it is like, nearest first: Ubuntu is like Debian, and has not its packages.

    >>> parse_kinds('ID_LIKE="ubuntu debian"\\nID=linuxmint')
    ('linuxmint', 'ubuntu', 'debian')
    """
    lines = sorted(line for line in text.splitlines() if "=" in line)
    return tuple(word for line in lines for word in re.findall(r"[a-z]+", line.partition("=")[2]))


def parse_targets(text: str) -> tuple[str, ...]:
    """The addresses of ``apt-get update --print-uris`` that may be the distribution's: others' (a vendor's) come last.

    >>> parse_targets("'https://repo.example/x/dists/stable/InRelease' a 0\\n"
    ...     "'http://m.x/debian/dists/bookworm-updates/InRelease' b 0\\n'http://m.x/debian/dists/bookworm/InRelease' c 0")
    ('http://m.x/debian/', 'https://repo.example/x/')
    """
    # what lies beside the suite itself (-updates, -security) is no archive of whole releases
    found = dict.fromkeys(re.findall(r"^'([^'\s]+/)dists/[a-z]+/InRelease' ", text, re.MULTILINE))
    usual = re.compile(r"/(?:debian|ubuntu|ubuntu-ports)/$")
    return tuple(sorted(found, key=lambda address: not usual.search(urlsplit(address).path)))


def ask_distribution(
    host: LocalHost, mirrors: Sequence[Mirror], folder: Path, architecture: str
) -> tuple[DebianPackage, ...] | str:
    """The CUDA compilers that a distribution packages for an architecture, by its signed index; else why there is none.

    ``folder`` is where apt keeps what it needs; the first of the mirrors that answers stays set up there.
    """
    if architecture not in ARCHITECTURES:
        return f"{mirrors[0].distribution.name} has no CUDA compiler package for {architecture}"
    reason = ""
    with FileLock(private_folder(folder) / ".lock"):
        for mirror in mirrors:
            _set_up(folder, mirror, ARCHITECTURES[architecture])
            updated = host.run(_apt(folder, "apt-get", "update", "--quiet"), timeout=ANSWER_TIMEOUT_SECONDS)
            listed = host.run(_apt(folder, "apt-cache", "madison", PACKAGE), timeout=ANSWER_TIMEOUT_SECONDS)
            rows = parse_madison(listed.stdout)
            found = tuple(package for row in rows if (package := _described(host, mirror, folder, *row)) is not None)
            if found:
                return found
            late = updated.stderr if updated.returncode is None else ""
            why = late or _complaint(updated.stderr) or f"it has no {PACKAGE} in {mirror.distribution.component}"
            reason = reason or f"{mirror.distribution.name}'s packages at {shown(mirror.address)}: {why}"
    return reason


def parse_madison(text: str) -> tuple[tuple[str, str], ...]:
    """Version and suite of each line of ``apt-cache madison``.

    >>> parse_madison(" nvidia-cuda-toolkit | 12.4.131~12.4.1-2 | http://deb.example/debian trixie/non-free amd64 Packages")
    (('12.4.131~12.4.1-2', 'trixie'),)
    """
    line = re.compile(
        r"^ *[a-z0-9.+-]+ \| *([0-9][A-Za-z0-9.+~:-]{0,60}) \| \S+ ([a-z]+)/\S+ \S+ Packages$", re.MULTILINE
    )
    return tuple((match[1], match[2]) for match in line.finditer(text))


def parse_record(text: str) -> tuple[int, str] | None:
    """Size and sha256 from ``apt-cache show``.

    >>> parse_record(f"Package: x\\nInstalled-Size: 5\\nSize: 87240108\\nSHA256: {'c' * 64}\\nSHA512: ff")[0]
    87240108
    """
    size = re.search(r"^Size: (\d{1,12})$", text, re.MULTILINE)
    digest = re.search(r"^SHA256: ([0-9a-f]{64})$", text, re.MULTILINE)
    return (int(size[1]), digest[1]) if size and digest else None


def fetch_package(host: LocalHost, package: DebianPackage, apt: Path, into: Path, say: Say) -> None:
    """Fetch a package that ``ask_distribution`` found; its compiler is put into ``into``, laid out as NVIDIA's.

    Raises BuildFailed.
    """
    scratch = into.with_name(f"{into.name}.deb")
    scratch.mkdir(parents=True)
    try:
        deb = _download(host, package, apt, scratch, say)
        answer = host.run(["dpkg-deb", "--extract", str(deb), str(scratch / "files")], timeout=UNPACK_TIMEOUT_SECONDS)
        if not answer.ok:
            raise BuildFailed(
                f"{deb.name} could not be unpacked: {why_failed(host, answer.stderr)}", hint="check the disk space"
            )
        for source, target in _places(scratch / "files"):
            (into / target).parent.mkdir(parents=True, exist_ok=True)
            source.rename(into / target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(host: LocalHost, package: DebianPackage, apt: Path, folder: Path, say: Say) -> Path:
    meter = Meter(say, package.name, package.size)
    lines: list[str] = []

    def on_line(line: str) -> None:
        state = re.match(r"dlstatus:\d+:([0-9.]+):", line)
        if state and float(state[1]) < 100:
            meter.at(int(package.size * float(state[1]) / 100))
        elif not state:
            lines.append(line)

    wanted = f"{package.name}={package.version}"
    argv = _apt(apt, "apt-get", "download", "--quiet", "-o", "APT::Status-Fd=1", wanted)
    with FileLock(apt / ".lock"):
        status = host.stream(argv, cwd=folder, env=_environment(host), on_line=on_line)
    debs = sorted(folder.glob("*.deb")) if status == 0 else []
    if len(debs) != 1:
        raise BuildFailed(
            f"apt could not fetch {wanted}: {_complaint(chr(10).join(lines)) or why_failed(host, chr(10).join(lines))}",
            hint="check the network and apt's mirror; or use --toolkit DIR with an existing toolkit",
        )
    found = sha256_of(debs[0])
    if found != package.sha256:
        raise BuildFailed(
            f"{debs[0].name} does not match {package.distribution}'s index: its sha256 is {found}, "
            f"expected {package.sha256}",
            hint="a proxy or mirror may have changed it; rerun",
        )
    meter.at(package.size)
    return debs[0]


def _places(files: Path) -> Iterator[tuple[Path, str]]:
    """The regular files of the package that make a compiler, and where NVIDIA's own toolkits have them."""
    library = files / "usr" / "lib" / PACKAGE
    folders = {
        library / "bin" / "crt": "bin/crt",
        library / "libdevice": "nvvm/libdevice",
        files / "usr" / "bin": "bin",
    }
    single = {
        library / "bin" / "nvcc": "bin/nvcc",
        library / "bin" / "cicc": "nvvm/bin/cicc",
        files / "usr" / "share" / "doc" / PACKAGE / "copyright": "LICENSE",
    }
    for folder, target in folders.items():
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            # usr/bin/nvcc is a script that knows only where the installed package is
            if path.name != "nvcc" and path.is_file() and not path.is_symlink():
                yield path, f"{target}/{path.name}"
    yield from ((path, target) for path, target in single.items() if path.is_file() and not path.is_symlink())


def _set_up(folder: Path, mirror: Mirror, architecture: str) -> None:
    if re.search(r'["\\\n]', str(folder)):
        raise BuildFailed(f"apt can't work in {folder!s:.100}", hint="export DSDOCTOR_CACHE=/a/plain/folder")
    for name in ("state/lists/partial", "cache/archives/partial", "log"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    distribution = mirror.distribution
    write_text(folder / "apt.conf", CONFIGURATION.format(folder=folder, architecture=architecture))
    sources = SOURCES.format(
        address=mirror.address,
        suites=" ".join(distribution.suites),
        component=distribution.component,
        architecture=architecture,
        keyring=mirror.keyring,
    )
    write_text(folder / "private.sources", sources)
    (folder / "private.sources").chmod(0o600)


def _described(host: LocalHost, mirror: Mirror, folder: Path, version: str, suite: str) -> DebianPackage | None:
    argv = _apt(folder, "apt-cache", "show", f"{PACKAGE}={version}")
    known = parse_record(host.run(argv, timeout=ANSWER_TIMEOUT_SECONDS).stdout)
    if known is None:
        return None
    return DebianPackage(
        name=PACKAGE,
        version=version,
        distribution=mirror.distribution.name,
        suite=suite,
        component=mirror.distribution.component,
        size=known[0],
        sha256=known[1],
    )


def _apt(folder: Path, program: str, *arguments: str) -> list[str]:
    return [program, "--config-file", str(folder / "apt.conf"), *arguments]


def _environment(host: LocalHost) -> dict[str, str]:
    return host.environment() | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}


def _complaint(text: str) -> str:
    """apt's first error, else its first warning, without the address's password.

    >>> _complaint("W: one\\nE: The repository 'x' is not signed.\\nE: more")
    "The repository 'x' is not signed."
    """
    found = [line for mark in ("E: ", "W: ") for line in text.splitlines() if line.startswith(mark)]
    return re.sub(r"://[^/@\s]+@", "://", found[0][3:].strip()) if found else ""


HEADERS_TIMEOUT_SECONDS = 120.0


def choose_headers(
    machine: Machine, request: BuildRequest, cache: str
) -> tuple[HeadersPlan | None, tuple[Choice, ...], tuple[Finding, ...]]:
    """Nothing when Python.h is there; the package to unpack where apt-get can fetch it; else an error with the fix."""
    python = machine.python
    if python is None or python.headers:
        return None, (), ()
    short = ".".join(python.version.split(".")[:2])
    if machine.system.apt_get and python.include == f"/usr/include/python{short}" and not request.offline:
        root = f"{cache}/headers/python{python.version}"
        plan = HeadersPlan(
            package=f"libpython{short}-dev",
            root=root,
            include=(f"{root}/usr/include/python{short}", f"{root}/usr/include"),
        )
        because = book.phrase("builder", "no-python-headers", version=python.version, include=python.include)
        choice = Choice(what="Python headers", value=f"{plan.package}, unpacked in {root}", because=because)
        return plan, (choice,), ()
    finding = book.finding(
        "python-headers-missing",
        Severity.ERROR,
        case="build",
        version=python.version,
        include=python.include,
        short=short,
    )
    return None, (), (finding,)


def unpack_headers(host: LocalHost, plan: HeadersPlan) -> None:
    """Fetch the package and unpack it; it is not installed. Raises BuildFailed when that cannot be done."""
    root = Path(plan.root)
    root = private_folder(root.parent) / root.name
    with FileLock(root.with_suffix(".lock")):
        if root.is_dir():
            return
        temporary = root.with_name(f".{root.name}.{os.getpid()}")
        temporary.mkdir(mode=0o700)
        try:
            _unpack(host, plan, temporary)
            temporary.rename(root)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _unpack(host: LocalHost, plan: HeadersPlan, folder: Path) -> None:
    lines: list[str] = []
    env = host.environment()
    # apt-get download writes to the current folder, and needs no root
    fetched = host.stream(["apt-get", "download", "--quiet", plan.package], cwd=folder, env=env, on_line=lines.append)
    packages = sorted(folder.glob("*.deb")) if fetched == 0 else []
    if packages:
        answer = host.run(["dpkg-deb", "--extract", str(packages[0]), str(folder)], timeout=HEADERS_TIMEOUT_SECONDS)
        lines += answer.stderr.splitlines()
        packages[0].unlink()
    if not list(folder.glob("usr/include/python3*/Python.h")):
        raise BuildFailed(
            f"apt-get could not fetch {plan.package}, which holds Python.h: {why_failed(host, chr(10).join(lines))}",
            hint=step("sudo apt-get update && sudo apt-get install {package}", package=plan.package).line,
        )
