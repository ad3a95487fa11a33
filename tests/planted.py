"""Tokens in every variable that dsdoctor reads or hands on, in every wording in which people put them there."""

from collections.abc import Iterable
from dataclasses import dataclass

FLAGS = (
    "CFLAGS",
    "CXXFLAGS",
    "CPPFLAGS",
    "LDFLAGS",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_FLAGS",
    "EXTRA_CFLAGS",
)
COMMANDS = ("CC", "CXX", "CUDACXX", "PYTORCH_NVCC")
FOLDERS = (
    "CUDA_HOME",
    "CUDA_PATH",
    "CUTLASS_PATH",
    "CUTLASS_HOME",
    "CUTLASS_ROOT",
    "CUDA_ROOT",
    "CCL_ROOT",
    "CUDA_INC_PATH",
    "CPATH",
    "LIBRARY_PATH",
    "TORCH_EXTENSIONS_DIR",
    "CONDA_PREFIX",
    "VIRTUAL_ENV",
)
SWITCHES = ("DS_ACCELERATOR", "DS_SKIP_CUDA_CHECK", "DS_NVCC_THREADS", "MAX_JOBS", "PIP_NO_BUILD_ISOLATION")
LISTS = ("TORCH_CUDA_ARCH_LIST", "DS_EVOFORMER_GPU_ARCH", "CUDA_VISIBLE_DEVICES")
NUMBERS = ("DS_BUILD_OPS", "DS_BUILD_STRING", "DS_BUILD_CUTLES_OPS", "DS_BUILD_TOKEN")
ADDRESSES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "http_proxy", "HTTPS_PROXY", "ALL_PROXY")
EVERY = (*FLAGS, *COMMANDS, *FOLDERS, *SWITCHES, *LISTS, *NUMBERS)

IN_ADDRESSES = {
    "password": "https://u:{}@h/simple",
    "password with @": "https://u:p@{}@h/simple",
    "password with /": "https://u:p/{}@h/simple",
    "password with #": "https://u:p#{}@h/simple",
    "password alone with /": "https://u/{}@h/simple",
    "password alone with #": "https://u#{}@h/simple",
    "user": "https://{}@h:8080/simple",
    "upper case": "HTTPS://u:{}@H/simple",
    "query": "https://h/simple?token={}",
    "query of a bare host": "https://h?token={}",
    "fragment": "https://h/simple#{}",
    "parameter": "https://h/simple;key={}",
    "IPv6": "http://u:{}@[2001:db8::1]:3128/",
    "git": "git+https://u:{}@h/o/r.git@main",
    "file": "file:///opt/wheels?token={}",
    "like ssh": "{}@h:o/r.git",
    "like ssh, with a password": "u:p@{}@h:3128",
}
IN_FLAGS = {
    "definition": "-DKEY={}",
    "definition with a blank": "-D KEY={}",
    "quoted definition": '-DKEY="a {}"',
    "quoted word": "'-DKEY=x {}'",
    "escaped": r"-DKEY=\"{}\"",
    "definition of its own name": "-D{}",
    "linker": "-Wl,--defsym,{}=1",
    "linker's rpath": "-Wl,-rpath,/x,{}",
    "response file": "@{}",
    "long option": "--token={}",
    "long option and value": "--token {}",
    "folder with an address": "-Ihttps://u:{}@h/",
    "folder with a query": "-isystem /x?{}",
    "warning": "-W{}",
    "machine": "-march={}",
    "feature": "-f{}",
    "host compiler": "-Xcompiler -DKEY={}",
    "bare": "{}",
    "quote that does not end": "-DKEY='a {}",
}
IN_PATHS = {
    "whole value": "{}",
    "folder": "/srv/{}/cuda",
    "last folder": "/srv/x-{}",
    "home": "~/{}/cuda",
    "variable": "$HOME/{}",
    "program": "/srv/{}/bin/nvcc",
}
"""Each is a value by itself."""

WORDINGS = {**IN_ADDRESSES, **IN_FLAGS}
COMPILED = ("definition", "definition with a blank", "quoted definition", "quoted word", "escaped", "linker")
"""The wordings that a compiler takes."""


HARMLESS = {**dict.fromkeys(FLAGS, "-O2 -I/opt/x"), **dict.fromkeys(COMMANDS, "g++"), "CUDA_HOME": "/opt/x"}


def after_harmless(name: str, *words: str) -> str:
    """A value for a variable: what is harmless there, then the words."""
    between = ":" if name in FOLDERS else " "
    return between.join([*([HARMLESS[name]] if name in HARMLESS else []), *words])


@dataclass(frozen=True)
class Planted:
    """An environment, and what each token in it says of its place."""

    env: dict[str, str]
    tokens: dict[str, str]

    def found_in(self, text: str) -> list[str]:
        """The places of the tokens that stand in a text."""
        low = text.lower()
        return [place for token, place in self.tokens.items() if token.lower() in low]

    def __or__(self, other: "Planted") -> "Planted":
        return Planted(env=self.env | other.env, tokens=self.tokens | other.tokens)


def token(number: int) -> str:
    """A token that begins like a word, as Hugging Face's do, and is different for every number."""
    return f"hf_S3cr{number:04d}" + "xQ9" * 9


def plant_alone(names: Iterable[str], wording: str, *, first: int = 0) -> Planted:
    """One wording as the whole value of every variable."""
    tokens = {token(first + number): f"{name}: alone, {wording}" for number, name in enumerate(names)}
    env = {place.partition(":")[0]: wording.format(made) for made, place in tokens.items()}
    return Planted(env=env, tokens=tokens)


def plant(names: Iterable[str], wordings: dict[str, str], *, first: int = 0) -> Planted:
    """Every wording in every variable, after a harmless word. Tokens are counted from ``first``."""
    env: dict[str, str] = {}
    tokens: dict[str, str] = {}
    for name in names:
        words = []
        for wording, text in wordings.items():
            made = token(first + len(tokens))
            tokens[made] = f"{name}: {wording}"
            words.append(text.format(made))
        env[name] = after_harmless(name, *words)
    return Planted(env=env, tokens=tokens)
