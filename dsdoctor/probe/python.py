"""Host + interpreter path -> what its environment holds."""

from dataclasses import dataclass, field

from dsdoctor.answers import parse_answer
from dsdoctor.host import Host
from dsdoctor.machine import Gap, Python


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An interpreter, and the folders of the packages that other questions read."""

    python: Python
    torch: str | None = None
    deepspeed: str | None = None
    cutlass: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Answer:
    executable: str
    version: str
    tag: str
    platform: str
    site: tuple[str, ...]
    include: str
    headers: bool
    scripts: str
    packages: dict[str, str] = field(default_factory=dict)
    torch: str | None = None
    deepspeed: str | None = None
    cutlass: str | None = None


def ask_python(host: Host, python: str) -> Environment | Gap:
    """Ask the interpreter who it is; torch is not imported."""
    answer = parse_answer(host.ask(python, "ask_python.py", timeout=60), _Answer, f"python {python}")
    if isinstance(answer, Gap):
        return answer
    return Environment(
        python=Python(
            executable=answer.executable,
            version=answer.version,
            tag=answer.tag,
            platform=answer.platform,
            site=answer.site,
            include=answer.include,
            headers=answer.headers,
            scripts=answer.scripts,
            packages=answer.packages,
        ),
        torch=answer.torch,
        deepspeed=answer.deepspeed,
        cutlass=answer.cutlass,
    )
