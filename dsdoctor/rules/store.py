"""The files of the book, and what is derived from them and kept as JSON in their folder: how logs are read, an index.

A wheel brings both from its build (setup.py). A checkout derives them at first need and keeps them there, as Python keeps its .pyc
(and not under PYTHONDONTWRITEBYTECODE); where the folder cannot be written they are derived each time. The table of log rules
counts only with the digest of the files that it was made from, the index only with their sizes, and only where the rule is found.
"""

import functools
import json
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsdoctor.core.files import open_file

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml

Table = Mapping[str, Any]
FOLDER = Path(__file__).parent
LOGS = "logs"
"""The folder of the rules of logs, and the place of their pages among the rooms'."""
FORMS = "forms"
"""The folder of what else the lines of logs are known by: marks, facts, projects. It has no rules and no pages."""
ORDER = "order.toml"
TABLE, INDEX = "table.json", "index.json"
CODE = ("store.py", "words.py")
"""What the table depends on beside the rules themselves."""
ENTRY = re.compile(r"^\[\[(?:rule|regression)\]\]$", re.MULTILINE)
ID = re.compile(r'^id = "([\w-]+)"$', re.MULTILINE)
PAGE_ONLY = {"means", "matters", "seen", "raised", "since", "formerly"}
"""What no diagnosis reads."""


@functools.cache
def order() -> Table:
    """The order of the rooms and of the logs' topics."""
    return parse(read(ORDER))


def files_of(room: str) -> list[str]:
    """The files of a room, by their names in the folder."""
    return [f"{room}/{topic}.toml" for topic in order()[room]] if room in {LOGS, FORMS} else [f"{room}.toml"]


def read(file: str) -> str:
    """The text of a file of the book."""
    return _content(file).decode("utf-8")


def _content(file: str) -> bytes:
    """A file of the folder. In a script's process it is no file of the script's."""
    with open_file(FOLDER / file, "rb") as stream:
        return stream.read()


def parse(text: str) -> Table:
    """TOML as a table."""
    table: Table = toml.loads(text)
    return table


def log_topics() -> dict[str, Table]:
    """The whole tables of the logs' topics, in their order: the first rule that explains a line counts."""
    return {topic: parse(read(file)) for topic, file in zip(order()[LOGS], files_of(LOGS), strict=True)}


def log_table() -> Mapping[str, Table]:
    """The rules of each topic as a diagnosis reads them: without their pages, every wording with its words."""
    topics: Mapping[str, Table] = _table()["topics"]
    return topics


def forms(topic: str) -> Table:
    """What stands in a file of forms, its patterns whole, every mark and clue with its words."""
    table: Table = _table()["forms"][topic]
    return table


def form(topic: str, name: str) -> re.Pattern[str]:
    """The pattern of a ``[[form]]``."""
    return re.compile(forms(topic)["form"][name])


def form_in_bytes(topic: str, name: str) -> re.Pattern[bytes]:
    """The same for a raw line."""
    return re.compile(forms(topic)["form"][name].encode())


@functools.cache
def _table() -> Table:
    digest = _digest()
    kept = _kept(TABLE)
    if kept.get("made_from") != digest:
        kept = make_table()
        _keep(TABLE, kept)
    return kept


def make_table() -> Table:
    """The table of log rules and of forms, derived from the files."""
    topics = {
        name: {
            "rule": [_for_diagnosis(rule, topic.get("faults", "")) for rule in topic["rule"]],
            "regression": [_with_words(row) for row in topic.get("regression", ())],
        }
        for name, topic in log_topics().items()
    }
    forms = {topic: _whole(parse(read(file))) for topic, file in zip(order()[FORMS], files_of(FORMS), strict=True)}
    return {"made_from": _digest(), "topics": topics, "forms": forms}


def _whole(forms: Table) -> Table:
    """A file of forms with the parts in their places in its patterns, alternatives as one pattern, words where none are given."""
    parts = {"titles": "|".join(forms.get("titles", ())), **forms.get("parts", {})}

    def pattern(given: str | list[str]) -> str:
        text = given if isinstance(given, str) else "|".join(given)
        return functools.reduce(lambda made, part: made.replace(f"<{part}>", parts[part]), parts, text)

    def entry(table: Table) -> Table:
        words = table.get("words", "")
        made = {**table, "pattern": pattern(table["pattern"])}
        return _with_words({**made, "words": words if isinstance(words, str) else " ".join(words)})

    whole = {kind: [entry(one) for one in forms[kind]] for kind in ("mark", "clue") if kind in forms}
    return {**forms, **whole, "form": {one["name"]: pattern(one["pattern"]) for one in forms.get("form", ())}}


def _for_diagnosis(rule: Table, faults: str) -> Table:
    """A rule without its page. ``faults``: what ``{faults}`` stands for in its wordings."""
    needed = {key: value for key, value in rule.items() if key not in PAGE_ONLY}
    wordings = [
        {**wording, "unless": wording["unless"].replace("{faults}", faults)} if "unless" in wording else wording
        for wording in rule.get("wording", ())
    ]
    if rule.get("general"):  # no line is searched for one
        return {**needed, "wording": wordings}
    return {**needed, "wording": [_with_words(wording) for wording in wordings]}


def _with_words(wording: Table) -> Table:
    from dsdoctor.rules.words import derived_parts, derived_words

    pattern = wording["pattern"]
    return {
        **wording,
        "words": wording.get("words") or derived_words(pattern),
        "parts": "\n".join(derived_parts(pattern)),
    }


def _digest() -> str:
    """The digest of all that the table is made from."""
    import hashlib

    digest = hashlib.sha256()
    for file in (*CODE, ORDER, *files_of(LOGS), *files_of(FORMS)):
        content = _content(file)
        digest.update(f"{file} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def texts_of(rule: str) -> list[tuple[str, str]]:
    """Each room that has the rule, with the text behind its ``[[rule]]``. Opens only the files that have it."""
    for index in (_index(), None):
        files = _all_files() if index is None else _files_by_room(index["rules"].get(rule, ()))
        found = [(room, text) for room, file in files for text in entries_in(file) if rule in ID.findall(text)]
        if found and (index is None or len(found) == len(files)):
            break
    return found


@functools.cache
def _index() -> Table:
    """In which files a rule is, for all rules."""
    sizes = {file: (FOLDER / file).stat().st_size for _, file in _all_files()}
    kept = _kept(INDEX)
    if kept.get("sizes") != sizes:
        kept = make_index()
        _keep(INDEX, kept)
    return kept


def make_index() -> Table:
    """The index of rules, derived from the files."""
    places: dict[str, list[str]] = {}
    for _, file in _all_files():
        for rule in dict.fromkeys(ID.findall(read(file))):
            places.setdefault(rule, []).append(file)
    return {"sizes": {file: (FOLDER / file).stat().st_size for _, file in _all_files()}, "rules": places}


def _all_files() -> list[tuple[str, str]]:
    return [(room, file) for room in order()["rooms"] for file in files_of(room)]


def _files_by_room(files: Iterable[str]) -> list[tuple[str, str]]:
    return [(LOGS if file.startswith(f"{LOGS}/") else file.removesuffix(".toml"), file) for file in files]


@functools.cache
def entries_in(file: str) -> tuple[str, ...]:
    """The text of each entry of a file, behind its ``[[rule]]``."""
    return tuple(ENTRY.split(read(file))[1:])


def write_all(folder: Path) -> None:
    """Write what is kept into a folder, from the build of a wheel."""
    for name, content in ((TABLE, make_table()), (INDEX, make_index())):
        (folder / name).write_bytes(_encoded(content))


def _encoded(content: Table) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _kept(name: str) -> Table:
    """What is kept under a name; nothing where it cannot be read."""
    try:
        content = json.loads(_content(name))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _keep(name: str, content: Table) -> None:
    """Keep it for the next process, where that is possible."""
    if not sys.dont_write_bytecode:
        from dsdoctor.core.files import write_bytes

        with suppress(OSError):
            write_bytes(FOLDER / name, _encoded(content))
