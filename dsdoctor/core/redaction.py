"""What of a variable, a flag or an address may be written down and shown: text in, text out, and the same again for its own.

What is known to be harmless survives, and the rest is counted or becomes "...". A path may be anything, so tokens are looked
for in it by the forms that their makers give them. A compiler gets its flags whole; only what is kept, printed or logged comes
through here.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dsdoctor.core.host import Answer, Host, LocalHost
from dsdoctor.core.processes import FileHolder, SharedMemory
from dsdoctor.core.text import nearest

GONE = "..."
TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    # makers' own lengths and prefixes: a folder called hf_Llama2Checkpoints7B or sk-learn-experiments is none
    r"hf_[A-Za-z0-9]{30,}"
    r"|gh[opsu]_\w{20,}|ghr_\w{20,}|github_pat_\w{20,}|gl(?:pat|dt|rt|ptt)-[\w-]{20,}|npm_[A-Za-z0-9]{36}|pypi-AgE[\w-]{30,}|dckr_pat_[\w-]{20,}"
    r"|sk-(?:proj|ant|svcacct|admin|or)-[\w-]{20,}|sk-[A-Za-z0-9]{20,}|xox[abeoprs]-[\w-]{10,}|nvapi-[\w-]{20,}|wandb_v\d_\w{20,}|AIza[\w-]{30,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]+)?)"
)
"""A token of Hugging Face, GitHub, GitLab, npm, PyPI, Docker, OpenAI, Anthropic, Slack, NVIDIA, W&B, Google, AWS, or a JWT."""
NAMED = re.compile(
    r"(/[\w.-]{0,80}?(?:token|key|passw(?:or)?d|passphrase|secret|credentials?)=)([^/\s\"'`:;,()\[\]{}]+)",
    re.IGNORECASE,
)
"""A folder or file whose name says that a secret follows: its beginning, and the secret."""
OPAQUE = re.compile(
    r"(?<![A-Za-z0-9])(?:(?=[a-z]*\d)(?=\d*[a-z])[a-z0-9]{12,}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})",
    re.IGNORECASE,
)
"""What nobody would call a folder: many letters and digits in one word. Private indexes take such a one in place of a login."""
DIGEST_FOLDERS = re.compile(r"/[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{60}(?=/)")
"""PyPI's folder of a file, which is the file's own digest."""
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
COMPILER = re.compile(
    r"(?:[a-z0-9_]{1,20}-){0,5}(?:gcc|g\+\+|cc|c\+\+|cpp|clang|clang\+\+|nvcc|hipcc|icc|icpc|icx|icpx|dpcpp|nvc|nvc\+\+|pgcc|pgc\+\+|xlc|xlC"
    r"|CC|armclang|armclang\+\+|fcc|FCC|tcc|zig|mpi(?:cc|cxx|c\+\+|CC|icc|icpc|icx|icpx|gcc|gxx))(?:-?\d{1,3}(?:\.\d{1,3}){0,2})?"
)
"""The name of a program that compiles; what stands alone where one is expected and is none may be anything."""
WRAPPERS = ("ccache", "sccache", "distcc", "icecc", "env", "nice", "time")
DEFINED = re.compile(r"(-D\s?\w+=)(?:\\?\"[^\"\n,]*\"?|'[^'\n]*'?|[^\s\"',]+)")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,24}://[^\s\"'<>`\\]*")
AUTHORITY = re.compile(r"(?:[\w.%-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\])(?::\d{0,5})?")
SSH_LIKE = re.compile(r"(?<![\w/@.-])[\w.-]{1,99}(?::[^\s/\"']{0,199})?@(?=(?:[\w.-]+|\[[\w:.]+\]):[\w./~])")
COMMANDS = ("CC", "CXX", "CUDACXX", "PYTORCH_NVCC", "NVCC_CCBIN", "CUDAHOSTCXX")
FLAGS = ("CCC_OVERRIDE_OPTIONS", "_LINKER_OPTIONS", "MAKEFLAGS")
FOLDERS = (
    *("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDAToolkit_ROOT", "CUDA_TOOLKIT_ROOT_DIR", "EBROOTCUDA"),
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "CMAKE_PREFIX_PATH", "CUTLASS_PATH", "CCL_ROOT"),
    *("CUDA_INC_PATH", "TORCH_EXTENSIONS_DIR", "CONDA_PREFIX", "VIRTUAL_ENV"),
)
OF_FOLDERS = re.compile(r"_(?:HOME|ROOT|PATH|DIR|PREFIX|CACHE)$")
"""How the names of other variables end that name folders."""
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
OF_NCCL = (
    *(
        "SOCKET_IFNAME",
        "SOCKET_FAMILY",
        "SOCKET_NTHREADS",
        "NSOCKS_PERTHREAD",
        "CROSS_NIC",
        "NET",
        "NET_PLUGIN",
        "NET_GDR_LEVEL",
    ),
    *(
        "NET_GDR_READ",
        "NET_MERGE_LEVEL",
        "NET_FORCE_MERGE",
        "OOB_NET_IFNAME",
        "IB_HCA",
        "IB_GID_INDEX",
        "IB_ADDR_FAMILY",
    ),
    *(
        "IB_ADDR_RANGE",
        "IB_PKEY",
        "IB_SL",
        "IB_TC",
        "IB_DISABLE",
        "IB_CUDA_SUPPORT",
        "ALGO",
        "PROTO",
        "DEBUG",
        "DEBUG_SUBSYS",
    ),
    *("DEBUG_FILE", "TOPO_FILE", "TOPO_DUMP_FILE", "GRAPH_FILE", "GRAPH_DUMP_FILE", "CONF_FILE", "TUNER_PLUGIN"),
    *(
        "PROFILER_PLUGIN",
        "TUNER_CONFIG_FILE",
        "LAUNCH_MODE",
        "P2P_LEVEL",
        "P2P_DISABLE",
        "SHM_DISABLE",
        "COMM_ID",
        "RAS_ADDR",
    ),
)
STEERING = frozenset(
    (
        *(f"{library}_{name}" for library in ("NCCL", "RCCL") for name in OF_NCCL),
        *(
            "GLOO_SOCKET_IFNAME",
            "GLOO_DEVICE_TRANSPORT",
            "TP_SOCKET_IFNAME",
            "UCX_TLS",
            "UCX_NET_DEVICES",
            "UCX_LOG_LEVEL",
        ),
        *(
            "FI_PROVIDER",
            "FI_LOG_LEVEL",
            "FI_EFA_IFACE",
            "TORCH_DISTRIBUTED_DEBUG",
            "HCCL_SOCKET_IFNAME",
            "CCL_ATL_TRANSPORT",
        ),
        *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"),
    )
)
"""Variables of communication whose values are devices, addresses, files and the words of their libraries: none holds a secret."""
PLAIN = re.compile(r"[\w.,:;=^/%+~*\[\] -]{0,256}")
FOLDER_IN_VALUE = re.compile(r"[/~.$][^\s:;\"']*")
INTERPRETER = re.compile(r"(?:python|pypy|bash|sh|dash|zsh|perl|ruby|node)[\d.]*")
BETWEEN, IN_ADDRESS = r"[:;,?&#@\"'=\\]+", r"[:;,?&#@\"'=\\/]+"
MIN_LIKENESS = 0.75
QUOTES = re.compile(r"(?:LD|LC|PYTHON|TORCH|MALLOC|GLIBC)_?|LANG")
"""Names of variables whose values every program may quote when it starts."""
PLAIN_WORD = re.compile(r"[\d.+-]*|[A-Za-z]{1,3}(?:_[A-Za-z]{2,4})?(?:\.[\w-]+)?(?:@\w+)?|\w+\.so[\d.]*", re.ASCII)
"""Numbers, locales, libraries."""
MIN_PIECE_LENGTH = 6
"""Characters of a piece of a value that is looked for in other texts: a shorter one is part of harmless words."""


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
    return _counted([*map(_program, words[:programs]), *shown], len(hidden) + before)


def _program(word: str) -> str:
    """The path of a program without tokens; a name alone only where it is a compiler's or a wrapper's.

    >>> _program("/opt/bin/nvcc"), _program("x86_64-linux-gnu-g++-12"), _program("my_password")
    ('/opt/bin/nvcc', 'x86_64-linux-gnu-g++-12', '...')
    """
    known = "/" in word or word in WRAPPERS or word == GONE or COMPILER.fullmatch(word)
    return without_tokens(word) if known else GONE


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
    if without_tokens(word) != word or (word in TAKES and without_tokens(after) != after):
        return 0
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


def variable(name: str, value: str) -> str:
    """The value of an environment variable as it may be shown.

    >>> variable("CFLAGS", "-O2 -DKEY=abc"), variable("DS_BUILD_STRING", "+abc"), variable("DS_BUILD_OPS", "1")
    ('-O2 (1 more word not shown)', '...', '1')
    """
    return _rule_of(name)(value)


def setting(name: str, value: str) -> str:
    """The value of a variable as it may be shown on, or sent to, another host: of a name that is not known to hold none, numbers,
    switches and folders alone.

    >>> setting("NCCL_SOCKET_IFNAME", "=eth0,^docker0"), setting("NCCL_X_TOKEN", "hf_abc"), setting("NCCL_X", "4")
    ('=eth0,^docker0', '...', '4')
    >>> setting("UCX_PROXY", "https://u:p@h/x?token=a"), setting("PYTHONPATH", "/a:/b"), setting("HF_TOKEN", "hf_abc")
    ('https://h/x', '/a:/b', '...')
    """
    if "://" in value:
        return url(value) if URL.fullmatch(value) else GONE
    if name in STEERING:
        return value if PLAIN.fullmatch(value) else GONE
    if (rule := _rule_of(name)) not in (urls, _index_urls):
        return rule(value)
    return _folders(value) if re.match(r"[/.~$]", value) else _switch(value)


def process(words: Sequence[str], name: str) -> str:
    """A process of somebody: its program, what an interpreter runs, and how many words more it was started with. ``name`` is the
    kernel's, for one that has written something else over its words.

    >>> process(["/usr/bin/python3", "-m", "http.server", "--hub-token", "hf_abc"], "python3")
    '/usr/bin/python3 -m http.server (2 more words not shown)'
    >>> process(["bash", "/job/run.sh", "hunter2"], "bash"), process(["ray::Actor(key=abc)"], "ray::Actor"), process([], "x")
    ('bash /job/run.sh (1 more word not shown)', 'ray::Actor', 'x')
    """
    shown = list(itertools.takewhile(re.compile(FOLDER).fullmatch, words[:1]))
    if not shown:
        return name
    if INTERPRETER.fullmatch(shown[0].rpartition("/")[2]):
        if words[1:2] == ["-m"] and re.fullmatch(r"[\w.]{1,80}", "".join(words[2:3])):
            shown += words[1:3]
        elif re.fullmatch(FOLDER, "".join(words[1:2])) and "-c" not in words[1:2]:
            shown += words[1:2]
    return _counted(shown, len(words) - len(shown))


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
    return without_tokens(SSH_LIKE.sub("", text) if "@" in text else text)


def index_url(text: str) -> str:
    """The address of an index or of a file in it: a folder on the way that may be a token is left out too.

    >>> index_url("https://u:p@h/basic/AbCdEf0123456789/python/simple/"), index_url("https://h/whl/cu128/deepspeed-1.0.whl")
    ('https://h/basic/.../python/simple/', 'https://h/whl/cu128/deepspeed-1.0.whl')
    """
    scheme, slashes, rest = url(text).partition("://")
    host, *folders = rest.split("/")
    file = [folders.pop()] if folders and folders[-1].endswith((".whl", ".tar.gz", ".zip")) else []
    whole = "/".join(["", *folders, ""])
    digest = DIGEST_FOLDERS.search(whole)
    own = digest[0].split("/") if digest else []
    shown = [GONE if OPAQUE.search(folder) and folder not in own else folder for folder in folders]
    return without_tokens(f"{scheme}{slashes}{'/'.join([host, *shown, *file])}")


def _index_urls(text: str) -> str:
    return urls(URL.sub(lambda found: index_url(found[0]), text))


def without_tokens(text: str) -> str:
    """A path, or a text, without tokens: what has a maker's form, and what the name of a folder or file says is one.

    >>> without_tokens("/x/token=abc/lib:/y/api_key=d"), without_tokens("/x/keys=/token")
    ('/x/token=.../lib:/y/api_key=...', '/x/keys=/token')
    """
    text = TOKEN.sub(GONE, text)
    return NAMED.sub(lambda found: f"{found[1]}{GONE}", text) if "=" in text else text


class Hidden:
    """What an environment holds and must not get into a log, an answer or an error: ``out_of`` takes it out of any text."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._words = frozenset(word for name, value in environment.items() for word in _left_out(name, value))
        pieces = {
            piece for name, value in environment.items() for piece in (*_pieces(name, value), *_quoted(name, value))
        }
        # the name of who works here may be in an address too, and is in every path
        pieces -= {environment.get("USER"), environment.get("LOGNAME"), *environment.get("HOME", "").split("/")}
        longest_first = sorted({*pieces, *self._words}, key=lambda piece: (-len(piece), piece))
        known = "|".join(re.escape(piece) for piece in longest_first if len(piece) >= MIN_PIECE_LENGTH)
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
    if name in FOLDERS or OF_FOLDERS.search(name):
        return _folders
    if name in ARCHITECTURES:
        return _architectures
    if name == "CUDA_VISIBLE_DEVICES":
        return _gpus
    if name.startswith("DS_BUILD_"):
        return _number
    if name.endswith("INDEX_URL"):
        return _index_urls
    return _switch if name in SWITCHES else urls


def _folders(text: str) -> str:
    """Folders with ":" between them, without tokens; what is none becomes "...".

    >>> _folders("/opt/cuda:/x"), _folders("abc"), _folders("https://u:p@h/x")
    ('/opt/cuda:/x', '...', 'https://h/x')
    >>> _folders("/srv/hf_S3cr0001xQ9xQ9xQ9xQ9xQ9xQ9xQ9xQ9/cuda")
    '/srv/.../cuda'
    """
    if "://" in text:
        return without_tokens(url(text)) if URL.fullmatch(text) else GONE
    folders = (folder if re.fullmatch(r"(?:[/.~$][^?#&]*)?", folder) else GONE for folder in text.split(":"))
    return without_tokens(":".join(folders))


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
    return nearest(word.lower(), words, min_likeness=MIN_LIKENESS) is not None


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


def _quoted(name: str, value: str) -> Iterator[str]:
    """The words of a variable that the loader, the C library, Python or torch quotes in what it complains of, but for what such
    values are made of: paths, locales, plain words and numbers.

    >>> list(_quoted("LC_ALL", "en_US.UTF-8")), list(_quoted("LD_PRELOAD", "/lib/x.so --password s3cr3tA1b2"))
    ([], ['s3cr3tA1b2'])
    """
    if QUOTES.match(name):
        for word in re.split(r"[\s:;,=]+", value):
            if re.search(r"\d", word) and not word.startswith("/") and not PLAIN_WORD.fullmatch(word):
                yield word


def _pieces(name: str, value: str) -> Iterator[str]:
    """The parts of a value that are left out of what is shown of it."""
    shown = variable(name, value)
    if shown == value:
        return
    yield from (*TOKEN.findall(value), *(secret for _, secret in NAMED.findall(value)))
    parts = [part for word in value.split() for part in re.split(IN_ADDRESS if "://" in word else BETWEEN, word)]
    # a compiler quotes the value of an option without its letter
    values = [word[2:] for word in value.split() if re.match(r"-[A-Za-z]", word)]
    for word in (value, *value.split(), *parts, *values):
        # folders, numbers and the names of options are in every other text
        if word not in shown and not word.startswith("/") and not re.fullmatch(r"[\d.]*|--?[a-z-]*", word):
            yield word


class RedactingHost:
    """A Host that passes every question on to another, and whose answers may be written down: no error quotes what is hidden.

    Whoever only looks asks through this, so that nothing else ever gets into a Machine or a snapshot. A command still runs in the
    whole environment; what it answers when it succeeds is whole, what it complains of is not. A folder that is shown without its
    token is asked about as it is: what is shown of a variable stands for its real value in every later question.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._real: dict[str, str] = {}
        # not asked as a question: a Recorder would write it down
        self._hidden = Hidden(host.environment() if isinstance(host, LocalHost) else {})

    def variable(self, name: str) -> str | None:
        value = self._host.variable(name)
        return None if value is None else self._shown_value(name, value)

    def variables(self, prefix: str) -> dict[str, str]:
        return {name: self._shown_value(name, value) for name, value in self._host.variables(prefix).items()}

    def names(self, prefix: str) -> tuple[str, ...]:
        return self._host.names(prefix)

    def read(self, path: str) -> str | None:
        return self._host.read(self._asked(path))

    def search(self, path: str, pattern: str, *, most: int = 64) -> str:
        return self._host.search(self._asked(path), pattern, most=most)

    def glob(self, pattern: str) -> tuple[str, ...]:
        return tuple(map(self._shown, self._host.glob(self._asked(pattern))))

    def exists(self, path: str) -> bool:
        return self._host.exists(self._asked(path))

    def age(self, path: str) -> float | None:
        return self._host.age(self._asked(path))

    def holder(self, path: str) -> FileHolder | None:
        return self._host.holder(self._asked(path))

    def shared_memory(self, folder: str) -> SharedMemory | None:
        return self._host.shared_memory(self._asked(folder))

    def writable(self, path: str) -> bool:
        return self._host.writable(self._asked(path))

    def which(self, name: str) -> str | None:
        found = self._host.which(self._asked(name))
        return None if found is None else self._shown(found)

    def resolve(self, path: str) -> str:
        return self._shown(self._host.resolve(self._asked(path)))

    def free(self, path: str) -> int | None:
        return self._host.free(self._asked(path))

    def distrust(self, path: str, inside: str = "", *, existing: bool = False) -> str | None:
        why = self._host.distrust(self._asked(path), self._asked(inside), existing=existing)
        return None if why is None else self._shown(why)

    def cpus(self) -> int:
        return self._host.cpus()

    def run(self, argv: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None) -> Answer:
        changed = None if env is None else {name: self._asked(value) for name, value in env.items()}
        return self._redacted(self._host.run([*map(self._asked, argv)], timeout=timeout, env=changed))

    def ask(self, python: str, script: str, *arguments: str, timeout: float) -> Answer:
        asked = map(self._asked, arguments)
        return self._redacted(self._host.ask(self._asked(python), script, *asked, timeout=timeout))

    def stop(self) -> None:
        self._host.stop()

    def _shown_value(self, name: str, value: str) -> str:
        shown = variable(name, value)
        if shown != value:
            for folder in FOLDER_IN_VALUE.findall(value):
                parts, hidden = folder.split("/"), without_tokens(folder).split("/")
                changed = [at for at, pair in enumerate(zip(parts, hidden, strict=False), 1) if pair[0] != pair[1]]
                if changed and "/".join(hidden) in shown:
                    # of two that look alike the first one is asked about
                    self._real.setdefault("/".join(hidden[: changed[-1]]), "/".join(parts[: changed[-1]]))
        return shown

    def _asked(self, word: str) -> str:
        """A word of a question with the real folder in the place of the shown one."""
        for shown, real in self._real.items():
            word = word.replace(shown, real)
        return word

    def _shown(self, text: str) -> str:
        for shown, real in self._real.items():
            text = text.replace(real, shown)
        return text

    def _redacted(self, answer: Answer) -> Answer:
        # the answer itself is facts, which must not change where they happen to hold a word of somebody's flags
        stdout = answer.stdout if answer.ok else self._hidden.out_of(answer.stdout)
        stderr = self._hidden.out_of(answer.stderr)
        return replace(answer, stdout=self._shown(stdout), stderr=self._shown(stderr))
