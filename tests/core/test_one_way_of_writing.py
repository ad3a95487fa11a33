"""Whatever dsdoctor writes goes through core/files.py: the parsed source holds no other call that makes or changes a file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.source import PACKAGE, trees

WRITING_METHODS = {"write_text", "write_bytes", "touch", "NamedTemporaryFile", "mkstemp", "FileHandler"}
COPYING = {"copy", "copy2", "copyfile", "copytree", "move", "extractall", "unpack_archive"}
FLAGS = re.compile(r"O_(WRONLY|RDWR|CREAT|APPEND|TRUNC)|\b(NEW|NEW_FILE|EXISTING|EXISTING_FILE)\b")
SUSPECT = re.compile(
    rf"shutil\.|extractall|unpack_archive|os\.open\(|(ZipFile|open)\([^\n]*[\"'][rbt]*[wax+][bt+]*[\"']|\.({'|'.join(WRITING_METHODS)})\("
)

ALLOWED = {
    (
        "builder/cache/entry.py",
        "copy",
    ): "new files of the store: O_EXCL, O_NOFOLLOW, each byte digested on the way",
    ("builder/cache/entry.py", "new_file"): "the same",
    ("rules/store.py", "write_all"): "the build of the package itself, into its own folder",
    ("builder/make/make_wheel.py", "_copied"): "within the private folder of a build",
    ("builder/make/make_wheel.py", "gather"): "within the private folder of a build",
    ("builder/make/manifest.py", "write_into"): "into the file that core/files.py opened",
    ("builder/make/make_wheel.py", "packing"): "within the private folder of a build",
    ("builder/make/make_wheel.py", "put_in"): "into the file that core/files.py opened",
    ("builder/make/manifest.py", "prove"): "into the private folder of a build",
    ("builder/source/fetch.py", "lay_out"): "into the private folder of a build",
    ("builder/source/fetch.py", "_write"): "into the private folder of a build, with O_EXCL",
    ("builder/toolkit/download.py", "_opened"): "opens an address",
    ("builder/wheel/read.py", "_copied"): "into a private temporary folder, one library after the other",
    ("checkpoint/torch_file.py", "write_copy"): "into the file that core/files.py opened",
    ("child_scripts/deep_ops.py", ""): "runs in another interpreter, in a private folder",
    ("child_scripts/deep_ops.py", "judge"): "runs in another interpreter, in a private folder",
    ("child_scripts/take_wheel.py", "take"): "runs on a node without dsdoctor; O_EXCL, in a folder of mkdtemp",
    ("child_scripts/take_wheel.py", "remover"): "/dev/null",
    ("cli/__init__.py", "_flushed"): "/dev/null",
    ("cli/__init__.py", "_open_closed"): "/dev/null",
    ("core/processes.py", "redirect"): "a log that children go on writing to; O_NOFOLLOW",
    ("core/workspace.py", "_locked"): "a lock that several processes open; O_NOFOLLOW, in a folder that was looked at",
    ("run/hang_report.py", "_printed"): "/proc/PID/fd/2, the stderr of a rank that cannot print by itself",
}


def test_nothing_else_writes_files() -> None:
    found = {place: line for path in sorted(PACKAGE.rglob("*.py")) for place, line in writing(path)}
    found = {place: line for place, line in found.items() if place[0] != "core/files.py"}

    assert {place: line for place, line in found.items() if place not in ALLOWED} == {}
    assert set(ALLOWED) - set(found) == set(), "no longer needed"


def test_the_test_sees_what_it_looks_for(tmp_path: Path) -> None:
    lines = [
        "open(p, 'w')",
        "p.open(mode='ab')",
        "p.open('x')",
        "p.write_text('')",
        "shutil.move(a, b)",
        "os.open(p, os.O_WRONLY)",
        "tempfile.NamedTemporaryFile()",
        "zipfile.ZipFile(p, 'w')",
        "io.open(p, 'r+')",
    ]
    (tmp_path / "bad.py").write_text("def f():\n" + "".join(f"    {line}\n" for line in lines))
    (tmp_path / "good.py").write_text(
        "open(p)\np.open('rb')\nfiles.write_text(p, '')\nwrite_bytes(p, b'')\nos.open(p, os.O_RDONLY)\n"
    )

    assert [line for _, line in writing(tmp_path / "bad.py", tmp_path)] == list(range(2, 2 + len(lines)))
    assert list(writing(tmp_path / "good.py", tmp_path)) == []


def writing(path: Path, package: Path = PACKAGE) -> Iterator[tuple[tuple[str, str], int]]:
    """Each call that writes: (file, name of the function around it), and its line."""
    source = path.read_text(encoding="utf-8")
    if SUSPECT.search(source):  # most files need not be parsed
        yield from _in(
            trees()[path] if path in trees() else ast.parse(source), path.relative_to(package).as_posix(), ""
        )


def _in(node: ast.AST, path: str, around: str) -> Iterator[tuple[tuple[str, str], int]]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else around
        if isinstance(child, ast.Call) and _writes(child):
            yield (path, inside), child.lineno
        yield from _in(child, path, inside)


def _writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = getattr(call.func.value, "id", None) if isinstance(call.func, ast.Attribute) else None
    if name in WRITING_METHODS:
        return isinstance(call.func, ast.Attribute) and owner != "files"
    if name in COPYING:
        return owner == "shutil" or name in {"extractall", "unpack_archive"}
    if name == "open" and owner == "os":
        return FLAGS.search(ast.unparse(call)) is not None
    if name in {"open", "ZipFile"}:
        place = 1 if owner in {None, "io", "gzip", "tarfile", "zipfile", "codecs"} else 0
        given = [*call.args[place : place + 1], *(word.value for word in call.keywords if word.arg == "mode")]
        return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in given)
    return False
