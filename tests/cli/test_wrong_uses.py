"""Wrong uses of every command, generated from what each takes: one sentence, status 2, nothing on stdout."""

import typing
from collections.abc import Iterator

import pytest
from cyclopts import App

from dsdoctor.cli.app import COMMANDS, RENAMED, _import_all, make_app
from tests.cli.runner import run

pytestmark = pytest.mark.slow
WORD = "banana"
REQUIRED = {"memory": ("--config", "ds_config.json", "--model", "config.json")}
"""What else a command needs, so that only one thing is wrong."""


def commands(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every command that prints a document, with its words."""
    for name in app:
        if not name.startswith("-") and name not in RENAMED:
            words = (*path, name)
            yield from commands(app[name], words)
            if " ".join(words) in COMMANDS and app[name].default_command is not None:
                yield words, app[name]


def wrong_uses() -> Iterator[tuple[str, ...]]:
    """One mistake each."""
    app = make_app(every=True)
    _import_all(app)
    for words, command in commands(app):
        yield (*words[:-1], f"{words[-1][:2]}{words[-1][3:]}q")
        yield from ((*words, "--no-such-option"), (*words, "-Z"))
        arguments = list(command.assemble_argument_collection())
        needed = [WORD for argument in arguments if argument.required and not argument.names[0].startswith("-")]
        needed += REQUIRED.get(" ".join(words), ())
        if not any("tuple" in str(argument.hint) for argument in arguments if not argument.names[0].startswith("-")):
            places = sum(not argument.names[0].startswith(("-", "*")) for argument in arguments)
            yield (*words, *[WORD] * (places + 1))
        for argument in arguments:
            name = next((name for name in argument.names if name.startswith("--")), "")
            if not name or argument.hint is bool:
                continue
            yield (*words, *needed, name)
            inner = [argument.hint, *typing.get_args(argument.hint)]
            if int in inner or any(typing.get_origin(each) is typing.Literal for each in inner):
                yield (*words, *needed, name, WORD)


USES = sorted({" ".join(use): use for use in wrong_uses()}.values())


def test_there_are_many() -> None:
    assert len(USES) >= 200


@pytest.mark.parametrize("use", USES, ids=" ".join)
def test_a_wrong_use_is_one_sentence_and_status_2(use: tuple[str, ...]) -> None:
    done = run(*use)

    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("✗") == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 8
