"""Lines of launchers, shells and schedulers -> which process ended with which exit code or signal."""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

LOCAL_RANK = re.compile(r"--local_rank=(\d{1,5})")
BLOCK_RANK = re.compile(r"^rank\s{1,10}: (\d{1,6}) \(local_rank: (\d{1,5})\)")
NUMBERS = r"(?P<code>-?\d{1,3})"
FORMS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"^exitcode\s{{0,10}}: {NUMBERS} \(pid: (?P<pid>\d{{1,9}})",
        rf"failed \(exitcode: {NUMBERS}\) local_rank: (?P<local>\d{{1,5}}) \(pid: (?P<pid>\d{{1,9}})\)",
        rf"exits with return code = {NUMBERS}",
        rf"srun: error: (?P<host>\S{{1,80}}): tasks? (?P<task>\d{{1,6}})(?P<more>[-,][\d,-]{{1,60}})?"
        rf": Exited with exit code {NUMBERS}",
        r"srun: error: (?P<host>\S{1,80}): tasks? (?P<task>\d{1,6})(?P<more>[-,][\d,-]{1,60})?: (?P<name>Segmentation fault|Killed"
        r"|Aborted|Bus error|Terminated|Illegal instruction|Floating point exception|Out Of Memory|Hangup)",
        r"died with <Signals\.(?P<name>SIG[A-Z]{3,6})",
        r"exited on signal (?P<signal>\d{1,2})",
        r"\bCaught signal (?P<signal>\d{1,2}) \([A-Z]",
        r"terminated (?:with|by) signal (?P<name>SIG[A-Z]{3,6})",
        rf"(?:[Ee]xit(?:ed)?(?:ed with)?[ _](?:exit )?(?:code|status)"
        rf"|terminated with exit code|Exited \(|non-zero code)[ :=]{{0,8}}{NUMBERS}\b",
        r"^(?P<name>Segmentation fault|Killed|Aborted|Bus error|Illegal instruction|Floating point exception)"
        r"(?: \(core dumped\))?$",
        r"^\S{1,160}: line \d{1,6}: +(?P<pid>\d{1,9}) (?P<name>Segmentation fault|Killed|Aborted|Bus error|Illegal instruction"
        r"|Floating point exception|Terminated)\b",
        r"(?:^|: line \d{1,6}: +\d{1,9} |Zeile \d{1,6}: +\d{1,9} |\d )"
        r"(?P<kill>Getötet|Processus arrêté|Tué|Terminado \(killed\)|Matado"
        r"|已杀死|已砍掉|強制終了|Убито|Morto|Ucciso|죽었음)(?:\s|$)",
        r"^(?P<segv>Speicherzugriffsfehler|Erreur de segmentation|Violación de segmento|Fallo de segmentación|段错误|段錯誤"
        r"|セグメンテーション違反|Ошибка сегментирования)",
    )
)
FROM_OUTSIDE = {1, 2, 15}
"""Hangup, interrupt and termination: signals that somebody else sends."""

NAMES = {
    "Hangup": 1,
    "Segmentation fault": 11,
    "Killed": 9,
    "Out Of Memory": 9,
    "Aborted": 6,
    "Bus error": 7,
    "Terminated": 15,
    "Illegal instruction": 4,
    "Floating point exception": 8,
}


@dataclass(frozen=True, kw_only=True)
class Exit:
    """A process ended: with a positive code, or by a signal. ``root``: torchrun says that it was the first one."""

    line: int
    text: str
    code: int
    signal: int | None = None
    rank: int | None = None
    local: int | None = None
    pid: int | None = None
    host: str = ""
    root: bool = False
    time: str = ""
    error_file: str = ""

    @property
    def number(self) -> int | None:
        """The rank, or the number on the node where only that is known."""
        return self.rank if self.rank is not None else self.local

    @property
    def name(self) -> str:
        """``SIGSEGV``, or ``exit code 3``."""
        return signal_name(self.signal) if self.signal else f"exit code {self.code}"


def signal_name(number: int) -> str:
    """The name of a signal.

    >>> signal_name(11), signal_name(99)
    ('SIGSEGV', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_of(text: str, line: int, above: Callable[[], list[str]]) -> Exit | None:
    """What a clean line says of a process that ended badly. ``above``: the lines before it, the last one first.

    >>> exit_of("exitcode  : -11 (pid: 7)  (SIGSEGV)", 9, lambda: ["rank      : 3 (local_rank: 1)", "host: a"]).rank
    3
    >>> exit_of("command terminated with exit code 137", 1, list).name
    'SIGKILL'
    """
    for form in FORMS:
        if found := form.search(text):
            break
    else:
        return None
    groups = {name: value for name, value in found.groupdict().items() if value}
    code, number = _code_and_signal(groups)
    if not code and not number:
        return None
    several = "more" in groups
    block = above() if text.startswith("exitcode") else []
    rank, local, root = _of_the_block(block)
    if "task" in groups and not several:
        rank = int(groups["task"])
    if "exits with return code" in text and (found := LOCAL_RANK.search(text)):
        local = int(found[1])
    return Exit(
        line=line,
        text=text[:300],
        code=code,
        signal=number,
        rank=rank,
        local=local if local is not None else _int(groups.get("local")),
        pid=_int(groups.get("pid")),
        host=groups.get("host", "") or _value("host", block),
        root=root,
        time=_value("time", block),
    )


def _code_and_signal(groups: dict[str, str]) -> tuple[int, int | None]:
    if "name" in groups:
        named = NAMES.get(groups["name"])
        number = named or int(getattr(signal, groups["name"], 0))
        return 128 + number, number or None
    if "kill" in groups or "segv" in groups:
        number = 9 if "kill" in groups else 11
        return 128 + number, number
    if "signal" in groups:
        return 128 + int(groups["signal"]), int(groups["signal"])
    code = int(groups["code"])
    if code < 0:
        return code, -code
    if 128 < code <= 128 + 31:
        return code, code - 128
    # why: some agents print a negative code as an unsigned byte, 247 for -9
    return (code, 256 - code) if 256 - 31 <= code <= 255 and 256 - code in {4, 6, 7, 8, 9, 11, 15} else (code, None)


def _of_the_block(above: list[str]) -> tuple[int | None, int | None, bool]:
    """The rank of an entry of torchrun's summary, and whether it stands under "Root Cause"."""
    rank = next((found for text in above[:3] if (found := BLOCK_RANK.match(text))), None)
    root = any(text.startswith("Root Cause") for text in above[:6])
    return (int(rank[1]), int(rank[2]), root) if rank else (None, None, root)


def _value(name: str, block: list[str]) -> str:
    """What an entry of the summary says of a name."""
    return next((text.partition(": ")[2] for text in block[:4] if text.startswith(name)), "")


def _int(text: str | None) -> int | None:
    return int(text) if text else None
