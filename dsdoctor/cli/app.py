"""All commands, and what becomes of an error in any of them: one line of text or one JSON document, and a number."""

import contextlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter

from dsdoctor.cli.aliases import RENAMED, renamed
from dsdoctor.cli.ending import OK, USAGE, called_as, end_by_error, end_by_interrupt
from dsdoctor.cli.first_words import version_line
from dsdoctor.cli.statuses import GENERAL, OWN, statuses_line, statuses_of
from dsdoctor.core.errors import DoctorError, ImpossiblePlan, UsageError, refused_by_system
from dsdoctor.core.options import flag, option

NO_WHEEL: Mapping[str, Any] = {"wheel": None, "manifest": None, "ops": (), "toolkit": None}


@dataclass(frozen=True, kw_only=True)
class CommandEntry:
    """A command, or a command of a group. Only the one that is called is imported: a diagnosis must start fast.

    ``place``: its function, or the group's App. ``nothing``: the parts of its document when an error left nothing to show.
    ``filters``: it only reads, so a reader that goes away ends it as it ends any filter, and not with a verdict.
    """

    place: str = ""
    nothing: Mapping[str, Any] = field(default_factory=dict)
    filters: bool = False


COMMANDS = {
    "check": CommandEntry(
        place="dsdoctor.cli.check:check_command", filters=True, nothing={"machine": None, "ops": (), "ops_of": None}
    ),
    "explain": CommandEntry(
        place="dsdoctor.cli.explain:explain_command", filters=True, nothing={"manual": None, "url": None, "fixes": ()}
    ),
    "diagnose": CommandEntry(place="dsdoctor.cli.diagnose:diagnose_command", filters=True, nothing={"logs": ()}),
    "env": CommandEntry(
        place="dsdoctor.cli.env:env_command", filters=True, nothing={"set": {}, "prepend": {}, "shell": ()}
    ),
    "build-wheel": CommandEntry(place="dsdoctor.cli.build_wheel:build_wheel_command", nothing=NO_WHEEL),
    "prebuild": CommandEntry(place="dsdoctor.cli.prebuild:prebuild_command", nothing=NO_WHEEL),
    "install": CommandEntry(
        place="dsdoctor.cli.install:install_command",
        nothing={
            "did": "nothing",
            "version": None,
            "wheel": None,
            "ops": (),
            "untried": (),
            "candidates": (),
            "sha256": None,
            "nodes": (),
        },
    ),
    "toolkit": CommandEntry(
        place="dsdoctor.cli.toolkit:toolkit_command", nothing={"toolkit": None, "plan": None, "choices": ()}
    ),
    "wheel": CommandEntry(place="dsdoctor.cli.wheel:app"),
    "wheel verify": CommandEntry(filters=True, nothing={"built": None, "machine": None}),
    "wheel pick": CommandEntry(filters=True, nothing={"wheel": None, "wheels": ()}),
    "wheel index": CommandEntry(nothing={"index": None, "wheels": ()}),
    "cache": CommandEntry(place="dsdoctor.cli.cache:app", filters=True),
    "cache ls": CommandEntry(nothing={"folder": None, "limit": None, "size": None, "entries": (), "folders": ()}),
    "cache prune": CommandEntry(nothing={"folder": None, "limit": None, "size": None, "removed": (), "folders": ()}),
    "cache verify": CommandEntry(nothing={"folder": None, "limit": None, "whole": None}),
    "machine": CommandEntry(place="dsdoctor.cli.machine:app"),
    "machine look": CommandEntry(filters=True, nothing={"machine": None}),
    "machine record": CommandEntry(nothing={"file": None}),
    "machine compare": CommandEntry(filters=True, nothing={"differences": ()}),
    "config": CommandEntry(
        place="dsdoctor.cli.config:config_command",
        nothing={"deepspeed": None, "effective": None, "filled": (), "corrections": ()},
    ),
    "checkpoint": CommandEntry(
        place="dsdoctor.cli.checkpoint:checkpoint_command",
        filters=True,
        nothing={
            "folder": None,
            "latest": None,
            "tags": (),
            "tag": None,
            "facts": None,
            "files": {},
            "parameters": {},
            "frozen": {},
            "verdict": None,
            "why": "",
            "rank_bytes": 0,
            "repair": None,
            "merged": None,
            "universal": None,
        },
    ),
    "comm": CommandEntry(place="dsdoctor.cli.comm:comm_command", nothing={"report": None}),
    "memory": CommandEntry(
        place="dsdoctor.cli.memory:memory_command",
        filters=True,
        nothing={"prediction": None, "ledger": (), "unmeasured": (), "changes": (), "enough": None, "search": None},
    ),
    "hang": CommandEntry(
        place="dsdoctor.cli.hang:hang_command", filters=True, nothing={"incident": None, "stacks": ()}
    ),
    "trace": CommandEntry(place="dsdoctor.cli.trace:app", filters=True),
    "trace show": CommandEntry(nothing={"traces": (), "lines": ()}),
    "trace compare": CommandEntry(nothing={"comparison": None, "a": (), "b": ()}),
    "trace plot": CommandEntry(nothing={"file": None, "dtype": None}),
}

MOVED = {"push": "install WHEEL --hostfile FILE", "trace headroom": "trace show --headroom DTYPE"}
"""Commands of an earlier release, and what does their work now."""

WITHOUT_DOCUMENT = {"run": "dsdoctor.cli.run:run_command", "mcp": "dsdoctor.cli.mcp:mcp_command"}
"""Commands without --json: what stands on stdout is a script's, or a protocol's."""

FIRST = ("check", "install", "run", "diagnose", "hang", "comm", "config", "memory", "checkpoint", "build-wheel")
"""The commands on the first screen, in this order."""

GROUPS = {
    "Something is wrong": ("check", "diagnose", "run", "hang", "comm", "trace", "explain"),
    "Before a run": ("config", "memory", "checkpoint"),
    "Build and install": ("install", "build-wheel", "wheel", "toolkit", "env", "cache"),
    "Machines": ("machine",),
    "Agents and editors": ("mcp",),
}
"""All commands by what one is about to do: ``dsdoctor help --all``."""

ShellName = Annotated[
    Literal["bash", "zsh", "fish"] | None,
    option(name="--shell", metavar="bash|zsh|fish", help="Default: the one in $SHELL."),
]
ScriptFile = Annotated[Path | None, option(name=["-o", "--output"], metavar="FILE", help="Write the script here.")]
Yes = Annotated[bool, flag(name=["-y", "--yes"], help="Add the line to the shell's startup file without asking.")]

HELP = """Get DeepSpeed built, and keep it running."""
START = "Start with `dsdoctor check`. If a run failed, pass its log to `dsdoctor diagnose LOG`. "


def make_app(only: str = "", *, every: bool = False) -> App:
    """The command line with all commands, none of them imported yet; with ``only`` that one alone, which starts faster.

    Help shows the first screen, or with ``every`` all commands by group.
    """
    app = App(
        name="dsdoctor",
        help=f"{HELP}\n\n{START}" if every else HELP,
        help_epilogue=statuses_line(GENERAL) if every else _more_commands(),
        help_format="markdown",
        help_flags=["-h", "--help"],
        version=version_line,
        version_flags=["--version"],
        default_parameter=Parameter(
            negative=(), show_default=False, allow_repeating=True, json_list=False, json_dict=False
        ),
        group_commands=Group("Options", sort_key=len(GROUPS)),
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    first = Group("Commands", sort_key=0)
    titled = [Group(title, sort_key=place) for place, title in enumerate(GROUPS)]
    groups = {name: group for group, names in zip(titled, GROUPS.values(), strict=True) for name in names}
    for name, place in {**{name: each.place for name, each in COMMANDS.items()}, **WITHOUT_DOCUMENT}.items():
        if place and only in {name, ""} and not (only and name in WITHOUT_DOCUMENT):
            # --version is the whole program's, not a command's; a group says so itself
            more: dict[str, Any] = {} if place.endswith(":app") else {"version_flags": []}
            if name in OWN:
                more["help_epilogue"] = statuses_line(statuses_of(name))
            if name == "run":
                # what --help shows is the script's own, or that of the watch
                more["help_flags"] = []
            if not only:
                more["help"] = summary(place)
                more["show"] = name not in RENAMED and (every or name in FIRST)
                more["sort_key"] = FIRST.index(name) if name in FIRST else len(FIRST)
            app.command(place, name=name, group=groups.get(name) if every else first, **more)
    if not only:
        app.command(install_completion_command, name="--install-completion", version_flags=[], show=every)
    return app


def _more_commands() -> str:
    names = sorted({name for names in GROUPS.values() for name in names} - {*FIRST})
    return f"More commands: {', '.join(names)}. `dsdoctor help --all` shows them."


def run(arguments: Sequence[str], *, begun: Callable[[], object] = bool) -> int:
    """Do what a command line says; the exit status. ``begun`` is called where an interruption has become one line."""
    old, arguments = renamed(arguments)
    first = arguments[0] if arguments else ""
    name, as_json = old or first, wants_json(arguments)
    every = "--all" in arguments and {*arguments} <= {"--help", "-h", "--all"}
    try:
        begun()
        if old:
            _show_new_name(old)
        if every:
            arguments = ["--help"]
        app = make_app(first if first in COMMANDS else "", every=every)
        chain, apps, rest = app.parse_commands(arguments)
        name = old or " ".join(chain)
        with called_as(old):
            status = app(arguments, exit_on_error=False, print_error=False)
        if sys.stdout is not None:
            # what does not fit on a disk is told here; a reader that has gone changes no status
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.flush()
        # a group without a command shows its help, and that is not what it was called for
        return USAGE if apps[-1].default_command is None and not rest else status or OK
    except CycloptsError as error:
        hint = " ".join(filter(None, ["dsdoctor", RENAMED.get(old, name), "--help"]))
        complaint = UsageError(str(error), hint=hint)
        for moved in {first, " ".join(arguments[:2])} & MOVED.keys():
            complaint = UsageError(f"{moved!r} is no longer a command", hint=f"dsdoctor {MOVED[moved]}")
        return end_by_error(name, complaint, nothing=_nothing(name), as_json=as_json)
    except MemoryError:
        refused = ImpossiblePlan("dsdoctor could not allocate more memory", hint="see ulimit -v and the cgroup's limit")
        return end_by_error(name, refused, nothing=_nothing(name), as_json=as_json)
    except (DoctorError, OSError) as error:
        ours = error if isinstance(error, DoctorError) else refused_by_system(error)
        return end_by_error(name, ours, nothing=_nothing(name), as_json=as_json)
    except KeyboardInterrupt as error:
        return end_by_interrupt(name, error, nothing=_nothing(name), as_json=as_json)


def end_by_defect(arguments: Sequence[str], error: Exception) -> int:
    """A defect of ours: its traceback is on stderr already; the exit status."""
    old, words = renamed(arguments)
    name = old or name_of(words)
    ours = DoctorError(
        f"a defect of dsdoctor: {type(error).__name__}: {error}", hint="report it, with the output on stderr"
    )
    if wants_json(arguments):
        end_by_error(name, ours, nothing=_nothing(name), as_json=True)
    return ours.exit_code


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for a document, as far as that can be told when it cannot be parsed."""
    return any(re.fullmatch("--json(=(1|true|t|yes|y))?", word, re.I) for word in arguments)


def install_completion_command(*, shell: ShellName = None, output: ScriptFile = None, yes: Yes = False) -> int:
    """Install shell completion of commands, options and file names for bash, zsh or fish.

    Writes the script, and asks before it adds a line to ~/.bashrc or ~/.zshrc. Without a terminal, and without --yes, it
    prints the line instead.

    Example: dsdoctor --install-completion --shell bash
    """
    from dsdoctor.cli.completion import install_completion
    from dsdoctor.ui.terminal import Stream, show

    show(Stream(), install_completion(shell, output, yes=yes, script_of=completion))
    return OK


def completion(shell: Literal["bash", "zsh", "fish"]) -> str:
    """The script that completes commands, options and their values in a shell, and file names where none of them is meant."""
    app = make_app(every=True)
    _import_all(app)
    script = app.generate_completion(shell=shell)
    return script.replace("\ncomplete -F ", "\ncomplete -o default -F ") if shell == "bash" else script


def name_of(arguments: Sequence[str]) -> str:
    """The command that a command line names, as far as that can be told when it cannot be parsed."""
    pair = " ".join(arguments[:2])
    return pair if pair in COMMANDS else "".join(arguments[:1])


def is_filter(arguments: Sequence[str]) -> bool:
    """Whether a command line names a command that only reads, or one of a group whose commands all do."""
    names = (name_of(arguments), "".join(arguments[:1]))
    return any(COMMANDS[name].filters for name in names if name in COMMANDS)


def _show_new_name(old: str) -> None:
    from dsdoctor.ui.terminal import Stream, show

    show(Stream(stderr=True), [f"! dsdoctor {old} is now dsdoctor {RENAMED[old]}"])


def _nothing(name: str) -> Mapping[str, Any]:
    if name == "plan":
        return {"plan": None}
    entry = COMMANDS.get(name if name in COMMANDS else RENAMED.get(name, ""))
    return entry.nothing if entry else {}


def summary(place: str) -> str:
    """What a command's help says, or a group's, read in its source: importing them all takes a second."""
    import ast

    module, _, name = place.partition(":")
    file = Path(__file__).parents[2].joinpath(*module.split("."))
    source = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    for node in ast.walk(ast.parse(source.read_bytes())) if source.is_file() else ():
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
        if name == "app" and isinstance(node, ast.keyword) and node.arg == "help":
            # the first one in the file is the App's own
            return str(ast.literal_eval(node.value))
    return ""


def _import_all(app: App) -> None:
    """Completion names what every command takes."""
    for name, command in COMMANDS.items():
        if command.place:
            app[name]
