"""What of a variable, a flag or an address may be written down and shown. Pure: text in, text out, and the same again for its own.

Nothing is recognised as a secret: what is known to be harmless survives, and the rest is counted or becomes "...". A compiler
gets its flags whole; only what is kept, printed or logged comes through here.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping

from dsdoctor.core.harmless_flags import GONE, SHELL_WORD, command, flags, parted, programs_of

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,24}://[^\s\"'<>`\\]*")
AUTHORITY = re.compile(r"(?:[\w.%-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\])(?::\d{0,5})?")
SSH_LIKE = re.compile(r"(?<![\w/@.-])[\w.-]{1,99}(?::[^\s/\"']{0,199})?@(?=(?:[\w.-]+|\[[\w:.]+\]):[\w./~])")

COMMANDS = ("CC", "CXX", "CUDACXX", "PYTORCH_NVCC", "NVCC_CCBIN", "CUDAHOSTCXX")
FLAGS = ("CCC_OVERRIDE_OPTIONS", "_LINKER_OPTIONS", "MAKEFLAGS")
FOLDERS = (
    *("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDAToolkit_ROOT", "CUDA_TOOLKIT_ROOT_DIR", "EBROOTCUDA"),
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "CMAKE_PREFIX_PATH", "CUTLASS_PATH", "CCL_ROOT"),
    *("CUDA_INC_PATH", "TORCH_EXTENSIONS_DIR", "CONDA_PREFIX"),
)
ARCHITECTURES = ("TORCH_CUDA_ARCH_LIST", "DS_EVOFORMER_GPU_ARCH")
ARCHITECTURE = re.compile(r"(?:(?:sm|compute)_?)?\d{1,3}(?:\.\d{1,2})?[a-z]?(?:\+PTX)?", re.IGNORECASE)
ARCHITECTURE_NAMES = (
    *("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"),
    *("kepler+tegra", "kepler+tesla", "maxwell+tegra", "all", "all-major", "common", "native", "auto"),
)
GPUS = re.compile(
    r"\s*(?:-?\d{1,4}|GPU-[0-9a-f-]{1,36}|MIG-(?:GPU-)?[0-9a-f-]{1,36}(?:/\d+){0,2}|none|all|void|NoDevFiles|)\s*"
)
WORDS = (
    *("true", "false", "yes", "no", "on", "off"),
    *("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu"),
)
SWITCHES = (
    *("DS_ACCELERATOR", "DS_ENABLE_NINJA", "DS_SKIP_CUDA_CHECK", "DS_IGNORE_CUDA_DETECTION", "DS_NVCC_THREADS"),
    *("DS_DEBUG_CUDA_BUILD", "MAX_JOBS", "PIP_NO_BUILD_ISOLATION", "TORCH_DONT_CHECK_COMPILER_ABI"),
)
BETWEEN, IN_ADDRESS = r"[:;,?&#@\"'=\\]+", r"[:;,?&#@\"'=\\/]+"
ALIKE = 0.75
SHORTEST = 6
"""Characters of a piece of a value that is looked for in other texts: a shorter one is part of harmless words."""


def variable(name: str, value: str) -> str:
    """The value of an environment variable as it may be shown.

    >>> variable("CFLAGS", "-O2 -DKEY=abc"), variable("DS_BUILD_STRING", "+abc"), variable("DS_BUILD_OPS", "1")
    ('-O2 (1 more word not shown)', '...', '1')
    """
    return _rule_of(name)(value)


def url(text: str) -> str:
    """The scheme, host and path of an address; where it cannot be said for sure what is its host, the scheme alone.

    >>> url("git+https://u:p@SECRET@[::1]:8080/o/r.git@main?token=x#y"), url("https://u:p/q@h/x"), url("file:///a/b")
    ('git+https://[::1]:8080/o/r.git@main', 'https://...', 'file:///a/b')
    """
    scheme, _, rest = text.partition("://")
    end = re.search(r"[/?#;]", rest)
    authority, tail = (rest[: end.start()], rest[end.start() :]) if end else (rest, "")
    host = authority.rpartition("@")[2]
    path = re.split(r"[?#;]", tail, maxsplit=1)[0]
    # a password may hold what ends a host or a path elsewhere
    doubtful = re.search(r"[^/]@[^/]*/", tail) or (not path and "@" in tail)
    if doubtful or not AUTHORITY.fullmatch(host):
        return f"{scheme}://{GONE}"
    return f"{scheme}://{host}{path}"


def urls(text: str) -> str:
    """A text with every address in it cut to scheme, host and path, and without the user before host:path.

    >>> urls("fetch HTTPS://me:pw@h/x?token=a, then me:pw@h:o/r.git")
    'fetch HTTPS://h/x then h:o/r.git'
    """
    if "://" in text:
        text = URL.sub(lambda found: url(found[0]), text)
    return SSH_LIKE.sub("", text) if "@" in text else text


class Hidden:
    """What an environment holds and must not get into a log, an answer or an error: ``out_of`` takes it out of any text."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._words = frozenset(word for name, value in environment.items() for word in _left_out(name, value))
        pieces = {piece for name, value in environment.items() for piece in _pieces(name, value)}
        # the name of who works here may be in an address too, and is in every path
        pieces -= {environment.get("USER"), environment.get("LOGNAME"), *environment.get("HOME", "").split("/")}
        longest_first = sorted({*pieces, *self._words}, key=lambda piece: (-len(piece), piece))
        known = "|".join(re.escape(piece) for piece in longest_first if len(piece) >= SHORTEST)
        # pip quotes some values in small letters
        self._known = re.compile(rf"(?<![A-Za-z0-9])(?:{known})(?![A-Za-z0-9])", re.IGNORECASE) if known else None

    @property
    def in_flags(self) -> bool:
        """Whether flags for compilers hold any of it."""
        return bool(self._words)

    def out_of(self, text: str) -> str:
        """The text without what is hidden, and with its addresses cut."""
        return urls(self._known.sub(GONE, text) if self._known else text)

    def out_of_words(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """The words of a command."""
        return tuple(GONE if word in self._words else self.out_of(word) for word in words)


def _rule_of(name: str) -> Callable[[str], str]:
    if name in COMMANDS:
        return command
    if name in FLAGS or name.endswith("FLAGS") or name.startswith("NVCC_"):
        return flags
    if name in FOLDERS:
        return _folders
    if name in ARCHITECTURES:
        return _architectures
    if name == "CUDA_VISIBLE_DEVICES":
        return _gpus
    if name.startswith("DS_BUILD_"):
        return _number
    return _switch if name in SWITCHES else urls


def _folders(text: str) -> str:
    """Folders with ":" between them; what is none becomes "...".

    >>> _folders("/opt/cuda:/x"), _folders("abc"), _folders("https://u:p@h/x")
    ('/opt/cuda:/x', '...', 'https://h/x')
    """
    if "://" in text:
        return url(text) if URL.fullmatch(text) else GONE
    return ":".join(folder if re.fullmatch(r"(?:[/.~$][^?#&]*)?", folder) else GONE for folder in text.split(":"))


def _architectures(text: str) -> str:
    """GPU architectures, misspelt names too.

    >>> _architectures("8.0;9.0+PTX"), _architectures("Hoper sm_90"), _architectures("8.0;hf_abc")
    ('8.0;9.0+PTX', 'Hoper sm_90', '8.0;...')
    """
    return re.sub(r"[^;,\s]+", lambda found: found[0] if _is_architecture(found[0]) else GONE, text)


def _is_architecture(entry: str) -> bool:
    known = ARCHITECTURE.fullmatch(entry) or _is_like(re.sub(r"(?i)\+PTX$", "", entry), ARCHITECTURE_NAMES)
    return entry == GONE or bool(known)


def _is_like(word: str, words: tuple[str, ...]) -> bool:
    return bool(difflib.get_close_matches(word.lower(), words, n=1, cutoff=ALIKE))


def _gpus(text: str) -> str:
    return ",".join(entry if GPUS.fullmatch(entry) else GONE for entry in text.split(","))


def _number(text: str) -> str:
    """What Python's int() takes, which is how DeepSpeed reads it.

    >>> _number(" 1"), _number("true"), _number("")
    (' 1', '...', '')
    """
    try:
        int(text or "0")
    except ValueError:
        return GONE
    return text


def _switch(text: str) -> str:
    """A number, or a word that switches something, misspelt too.

    >>> _switch("cudaa"), _switch("4"), _switch("hf_abc")
    ('cudaa', '4', '...')
    """
    return text if _is_like(text, WORDS) else _number(text)


def _left_out(name: str, value: str) -> Iterator[str]:
    """The words of a variable with flags that are not shown, as a program gets them: by blanks, and by a shell's rules."""
    if _rule_of(name) not in (flags, command):
        return
    words = SHELL_WORD.findall(value)
    hidden = parted(words[programs_of(words) if name in COMMANDS else 0 :]).hidden
    for word in hidden:
        yield from (word, re.sub(r"\\(.)|[\"']", r"\1", word), *word.split())


def _pieces(name: str, value: str) -> Iterator[str]:
    """The parts of a value that are left out of what is shown of it."""
    shown = variable(name, value)
    if shown == value:
        return
    parts = [part for word in value.split() for part in re.split(IN_ADDRESS if "://" in word else BETWEEN, word)]
    # a compiler quotes the value of an option without its letter
    values = [word[2:] for word in value.split() if re.match(r"-[A-Za-z]", word)]
    for word in (value, *value.split(), *parts, *values):
        # folders, numbers and the names of options are in every other text
        if word not in shown and not word.startswith("/") and not re.fullmatch(r"[\d.]*|--?[a-z-]*", word):
            yield word
