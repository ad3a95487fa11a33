"""Words of compilers and linkers: those that are known to be harmless, and how many others there are. Pure."""

import re
from typing import NamedTuple

GONE = "..."
PATH = r"[\w./~$\ufffd][\w./+~${}@\ufffd-]*"
"""A folder or a file in a list of linker's words. No "=", "," or ":", which stand between such words."""

FOLDER = rf"(?:/[^\s\"'\\:?#&]*|{PATH})"
"""A folder or a file by itself: from the root any name but one that can be part of an address."""

TAKES_PATH = (
    r"-I|-L|-B|-isystem|-iquote|-idirafter|-isysroot|-include|-ccbin|--compiler-bindir|--sysroot|--gcc-toolchain"
)
GPU = r"(?:sm|compute|lto)_\d{2,3}[af]?"
CODE = rf"arch=compute_\d{{2,3}}[af]?,code=\[?{GPU}(?:,{GPU})*\]?"
TARGET = rf"{GPU}|native|all|all-major"
TAKES = {
    **dict.fromkeys(TAKES_PATH.split("|"), FOLDER),
    **dict.fromkeys(("-gencode", "--generate-code"), CODE),
    **dict.fromkeys(("-arch", "--gpu-architecture", "-code", "--gpu-code"), TARGET),
    **dict.fromkeys(("-t", "--threads", "-split-compile", "--split-compile"), r"\d{1,3}"),
    **dict.fromkeys(("-std", "--std"), r"(?:c|gnu)(?:\+\+)?\d\w"),
    **dict.fromkeys(("-Xptxas", "--ptxas-options"), r"-v|-O\d|--verbose"),
    **dict.fromkeys(("-cudart", "--cudart"), r"none|shared|static"),
}
"""Flags with a value in the same word, after "=", or in the next word, and what the value may be."""

LINKER = (
    rf"-rpath(?:-link)?[,=]{PATH}|-z,(?:no)?[a-z]{{2,12}}|-O\d|-B[a-z-]{{6,20}}|--hash-style=\w{{3,4}}|--build-id(?:=\w{{3,4}})?"
    r"|--(?:no-)?(?:as-needed|undefined|gc-sections|sort-common|copy-dt-needed-entries|allow-shlib-undefined|whole-archive)"
    r"|--(?:en|dis)able-new-dtags|--start-group|--end-group|--exclude-libs,ALL"
)
WORD = r"[a-z][a-z0-9]{0,13}"
FLAG = (
    rf"-O(?:[0-3sgz]|fast)?|(?:{TAKES_PATH})={FOLDER}|-(?:I|L|B){FOLDER}"
    rf"|(?:-gencode|--generate-code)={CODE}|(?:-arch|-code|--gpu-architecture|--gpu-code)=(?:{TARGET})"
    r"|(?:-t|--threads|-split-compile|--split-compile)=?\d{1,3}|--?std=(?:c|gnu)(?:\+\+)?\d\w|-stdlib=libc\+\+"
    rf"|-W(?:no-)?(?:error=)?{WORD}(?:[+-]{WORD}){{0,7}}(?:=\d)?|-Wl(?:,(?:{LINKER}))+"
    rf"|-f(?:PIC|PIE)|-f(?:no-)?{WORD}(?:-{WORD}){{0,7}}(?:=[a-z0-9]{{1,12}})?"
    rf"|-f(?:file|debug|macro)-prefix-map={PATH}={PATH}"
    r"|-m(?:arch|tune|cpu|fpu|abi|cmodel)=[a-z][a-z0-9.+_-]{0,30}|-m(?:no-)?[a-z0-9][a-z0-9._-]{0,18}(?:=[a-z0-9]{1,8})?"
    r"|-g\d?|-ggdb\d?|-gdwarf(?:-\d)?|-gz|-gsplit-dwarf|-G|-(?:-generate-)?line-?info|-l[A-Za-z][\w+.-]{0,24}"
    r"|-D(?:NDEBUG|_GNU_SOURCE|_GLIBCXX_ASSERTIONS|_FORTIFY_SOURCE=\d|_GLIBCXX_USE_CXX11_ABI=[01])"
    r"|-(?:pthread|pipe|shared|static|rdynamic|nostdinc|nostdlib|no-pie|pie|ansi|pedantic|v|w|s|c|rdc=(?:true|false))"
    r"|--(?:verbose|use_fast_math|expt-(?:relaxed-constexpr|extended-lambda))|--?allow-unsupported-compiler"
    r"|-(?:Xptxas|-ptxas-options)=(?:-v|-O\d)|--?cudart=(?:none|shared|static)|--?diag-suppress=[\d,]{1,60}"
)
FOR_HOST_COMPILER = ("-Xcompiler", "--compiler-options")
SHELL_WORD = re.compile(r"""(?:\\.|"(?:\\.|[^"\\])*"?|'[^']*'?|[^\s"'\\]|\\$)+""", re.DOTALL)
NOT_SHOWN = re.compile(r"\s*\((\d+) (?:more )?words? not shown\)$")
WRAPPERS = ("ccache", "sccache", "distcc", "icecc", "env", "nice", "time")
DEFINED = re.compile(r"(-D\s?\w+=)(?:\\?\"[^\"\n,]*\"?|'[^'\n]*'?|[^\s\"',]+)")


class Parted(NamedTuple):
    """The words of a command that are shown, and those that are not."""

    shown: list[str]
    hidden: list[str]


def flags(text: str) -> str:
    """Flags of a compiler or linker: the known ones, and how many words are left out.

    >>> flags("-O3 -I/opt/x -isystem /opt/y -DTOKEN='a b' --token=c")
    '-O3 -I/opt/x -isystem /opt/y (2 more words not shown)'
    """
    rest, before = _without_count(text)
    shown, hidden = parted(SHELL_WORD.findall(rest))
    return _counted(shown, len(hidden) + before)


def command(text: str) -> str:
    """A compiler with its arguments, and with the wrappers in front of it.

    >>> command("ccache /usr/bin/g++ -m64 -DTOKEN=a"), command("g++-12"), command("env TOKEN=a g++")
    ('ccache /usr/bin/g++ -m64 (1 more word not shown)', 'g++-12', 'env (2 more words not shown)')
    """
    rest, before = _without_count(text)
    words = SHELL_WORD.findall(rest)
    programs = programs_of(words)
    shown, hidden = parted(words[programs:])
    return _counted([*words[:programs], *shown], len(hidden) + before)


def definitions(text: str) -> str:
    """A text without the values of a compiler's definitions, the harmless ones excepted.

    >>> definitions("cc -DA=1 -D B='x y' -D_FORTIFY_SOURCE=2 c.c")
    'cc -DA=... -D B=... -D_FORTIFY_SOURCE=2 c.c'
    """
    return DEFINED.sub(lambda found: found[0] if re.fullmatch(FLAG, found[0]) else f"{found[1]}{GONE}", text)


def parted(words: list[str]) -> Parted:
    """Flags and the values that belong to them, by whether they are known."""
    shown: list[str] = []
    hidden: list[str] = []
    at = 0
    while at < len(words):
        word, after = words[at], words[at + 1] if at + 1 < len(words) else ""
        taken = _taken(word, after)
        (shown if taken else hidden).extend(words[at : at + max(1, taken)])
        at += max(1, taken)
    return Parted(shown, hidden)


def _taken(word: str, after: str) -> int:
    """How many words the flag is with its value; 0 for one that is not known."""
    if word in TAKES:
        return 2 if re.fullmatch(TAKES[word], after) else 0
    if word in FOR_HOST_COMPILER:
        return 2 if _all_known(after) else 0
    name, equals, value = word.partition("=")
    if equals and name in FOR_HOST_COMPILER:
        return 1 if _all_known(value) else 0
    return 1 if re.fullmatch(FLAG, word) else 0


def _all_known(joined: str) -> bool:
    """Flags for the host's compiler, joined by commas."""
    return bool(re.fullmatch(FLAG, joined)) or all(re.fullmatch(FLAG, word) for word in joined.split(","))


def programs_of(words: list[str]) -> int:
    """How many words at the beginning are wrappers and the compiler."""
    for count, word in enumerate(words):
        if word.startswith("-") or not re.fullmatch(FOLDER, word):
            return count
        if word.rsplit("/", 1)[-1] not in WRAPPERS:
            return count + 1
    return len(words)


def _without_count(text: str) -> tuple[str, int]:
    """A text without the count that an earlier redaction put at its end, and that count."""
    found = NOT_SHOWN.search(text)
    return (text[: found.start()], int(found[1])) if found else (text, 0)


def _counted(shown: list[str], hidden: int) -> str:
    if not hidden:
        return " ".join(shown)
    more = f"({hidden} {'more ' if shown else ''}word{'s' if hidden > 1 else ''} not shown)"
    return " ".join([*shown, more])
