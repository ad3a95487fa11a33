"""``python -m dsdoctor.run [options] script.py args...``: an unmodified training script, with its engines watched.

The process becomes `python script.py args...`, as if that had been called, with a folder on PYTHONPATH whose
sitecustomize watches (`startup/`, `script.py`). What the script sees, how it ends, its traceback and
its signals are Python's own, and processes that it starts are watched alike. Imports neither torch nor DeepSpeed.
"""

import os
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", sys.flags.isolated):
    # `-m` put the working folder first: a json.py that lies there is the script's, if anybody's, and no module of ours
    del sys.path[0]

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import absolute
from dsdoctor.overflow.hooks.options import ANSWERS, LEVELS, Options
from dsdoctor.ranks import flight_recorder
from dsdoctor.run import checkpoint, hang, memory, op_compile
from dsdoctor.run.script import VARIABLE, RunOrder, rank, say

WATCH = "dsdoctor.overflow.watch.engine:watch"
STARTUP = Path(__file__).absolute().parent / "startup"
LEVEL_VARIABLE = "DSDOCTOR_OVERFLOW"
MAX_BATCHES = 100_000
OFF = "off"
CONFIG_CHECKS = ("warn", "strict", "off")
SHELL = "sh"
NO_MAIN = 0
"""In place of the script's pid: no process is the one that was called."""
LC_CTYPE = "LC_CTYPE"
HELP = "python -m dsdoctor.run --help"
DESCRIPTION = """\
Run a training script, unmodified, and watch every engine that deepspeed.initialize makes in it, Hugging Face's Trainer's
and accelerate's too: where the first inf or nan came from, on which rank, in which step. The script runs as without
dsdoctor: same arguments, traceback, exit status. When it fails by an exception, dsdoctor adds what it knows of that."""
EPILOG = """\
levels:
  guard     nothing is hooked until DeepSpeed finds an overflow; then the batch is replayed with every module watched
  frames    every module in every batch; the last --frames of them are shown at an overflow
  trace     the batches of --trace-batches, everything, to a file for each rank
  off       no watch; only failures are explained

the same under every launcher: dsdoctor.run stands before the script, the options for dsdoctor before the script's name:
  dsdoctor run train.py --epochs 3
  python -m dsdoctor.run train.py --epochs 3
  deepspeed --num_gpus 8 --module dsdoctor.run --overflow frames train.py --deepspeed ds_config.json
  torchrun --nproc_per_node 8 -m dsdoctor.run train.py
  accelerate launch -m dsdoctor.run --overflow frames train.py
  srun python -m dsdoctor.run train.py
  mpirun -n 2 python -m dsdoctor.run --trace-batches 1,3,10-12 train.py
  python -m dsdoctor.run -m package.train --epochs 3
  python -m dsdoctor.run - --epochs 3 < train.py
with a debugger or a profiler: python -m dsdoctor.run -m cProfile -o profile.out train.py
where that line cannot be changed, before it in the same shell or job script: eval "$(python -m dsdoctor.run --export sh)"

DSDOCTOR_OVERFLOW=LEVEL in the environment is --overflow LEVEL where that is not given, DSDOCTOR_HANG=off is --hang off.
If the training hangs, dsdoctor names the missing rank, its line and the cause. To ask at any time, send kill -USR2 to a rank;
afterwards, run dsdoctor hang DIR. Exit status: the script's own; 2
where the command makes no sense."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command line understood. ``options``: None for --overflow off. ``script``: what Python is to run, ``-m`` and a
    module's name or a path, then its arguments. ``memory``: off, oom or trace. ``checkpoint_check``: warn or off. ``hang``:
    the fields of its options, None for --hang off. ``exports``: no script is run, and the environment that would be is printed."""

    options: Options | None
    script: tuple[str, ...]
    config_check: str = "off"
    memory: str = memory.OOM
    checkpoint_check: str = checkpoint.OFF
    hang: dict[str, Any] | None = None
    exports: bool = False


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(message, hint=HELP)


def make_parser(environment: Mapping[str, str]) -> Parser:
    """Our options. All but --help take a value, which ``split_script`` counts on."""
    parser = Parser(
        prog="python -m dsdoctor.run",
        usage="%(prog)s [options] script.py [arguments ...]\n       %(prog)s [options] -m module [arguments ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    level = environment.get(LEVEL_VARIABLE)
    add("--overflow", metavar="LEVEL", default=level, help="guard (default), frames, trace or off")
    add(
        "--frames", metavar="N", type=int, default=Options.max_frames_to_save, help="frames shown (default %(default)s)"
    )
    add(
        "--trace-batches",
        metavar="1,3,10-12",
        default="",
        help="forward calls to trace, from 0; means --overflow trace",
    )
    add("--abort-after-batch", metavar="N", type=int, help="stop training after this forward call, on all ranks")
    add("--trace-dir", metavar="DIR", help="folder for the traces")
    add("--include", metavar="GLOB", action="append", default=[], help="watch only modules that match; repeatable")
    add("--exclude", metavar="GLOB", action="append", default=[], help="skip modules that match; repeatable")
    add(
        "--on-overflow",
        metavar="ANSWER",
        default=ANSWERS[0],
        help="report (default) and continue, or raise on all ranks",
    )
    add("--report", metavar="FILE", help="append the findings to this file, as JSON lines")
    add(
        "--config-check",
        metavar="MODE",
        default=CONFIG_CHECKS[0],
        help="check each engine's DeepSpeed configuration before initialize: warn (default), strict (do not start with an "
        "error), or off",
    )
    memory.add_option(parser)
    checkpoint.add_option(parser)
    hang.add_options(parser, environment)
    parser.add_argument(
        "--export",
        metavar=SHELL,
        help="run nothing; print shell lines that turn dsdoctor.run on for the commands after them",
    )
    return parser


def parse_command_line(argv: Sequence[str], environment: Mapping[str, str]) -> CommandLine:
    """What a command line asks for. Raises UsageError where that makes no sense.

    >>> parse_command_line(["--local_rank=1", "--frames", "5", "-m", "train", "--frames", "x"], {}).script
    ('-m', 'train', '--local_rank=1', '--frames', 'x')
    """
    launchers, rest = split_local_rank(argv)
    ours, words = split_script(rest)
    given = make_parser(environment).parse_args(ours)
    options = options_of(given)
    if given.export not in {None, SHELL}:
        raise UsageError(f"unknown --export {given.export!r}", hint=f"only {SHELL} is supported")
    if given.export and words:
        raise UsageError(f"--export runs nothing, but {words[0]} was given", hint="remove one of them")
    script = () if given.export else script_of(words, launchers)
    if given.config_check not in CONFIG_CHECKS:
        raise UsageError(f"unknown --config-check {given.config_check!r}", hint=f"one of {', '.join(CONFIG_CHECKS)}")
    return CommandLine(
        options=options,
        script=script,
        config_check=given.config_check,
        memory=memory.chosen(given.memory),
        checkpoint_check=checkpoint.chosen(given.checkpoint_check),
        hang=hang.options_of(given),
        exports=given.export is not None,
    )


def script_of(words: tuple[str, ...], launchers: tuple[str, ...]) -> tuple[str, ...]:
    """What Python is to run: -m and a module or a path, then its arguments, the launcher's own before the user's."""
    if not words:
        raise UsageError("no script given", hint=HELP)
    named = 2 if words[0] == "-m" else 1
    if len(words) < named:
        raise UsageError("-m needs a module", hint=HELP)
    if named == 1 and words[0] != "-" and not Path(words[0]).exists():
        raise UsageError(f"no such script: {words[0]}", hint=f"searched from {absolute('.')}; {HELP}")
    return (*words[:named], *launchers, *words[named:])


def options_of(given: argparse.Namespace) -> Options | None:
    """The options of the watch; None for none. Files are named from where the command was given: scripts change folders."""
    batches = parse_batches(given.trace_batches)
    level = given.overflow or ("trace" if batches else Options.level)
    if level not in {*LEVELS, OFF}:
        raise UsageError(f"unknown level {level!r}", hint=f"one of {', '.join(LEVELS)}, {OFF}; {HELP}")
    if level == "trace" and not batches:
        raise UsageError("--overflow trace needs --trace-batches", hint="--trace-batches 0,1")
    if batches and level != "trace":
        raise UsageError(f"--trace-batches needs --overflow trace, but it is {level}", hint="remove one of them")
    options = Options(
        level=Options.level if level == OFF else level,
        max_frames_to_save=given.frames,
        trace_batch_nums=batches,
        abort_after_batch_num=given.abort_after_batch,
        trace_dir=given.trace_dir and absolute(given.trace_dir),
        include=tuple(given.include),
        exclude=tuple(given.exclude),
        on_overflow=given.on_overflow,
        report_file=given.report and absolute(given.report),
    )
    options.check()
    return None if level == OFF else options


def split_local_rank(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A launcher's own argument, which it puts before ours and means for the script, and the rest.

    >>> split_local_rank(["--local_rank", "1", "train.py"])
    (('--local_rank', '1'), ('train.py',))
    >>> split_local_rank(["--local-rank=1", "train.py", "--local-rank=9"])
    (('--local-rank=1',), ('train.py', '--local-rank=9'))
    """
    first = argv[0] if argv else ""
    count = 2 if first in {"--local_rank", "--local-rank"} else 1 if re.match("--local[_-]rank=", first) else 0
    return tuple(argv[:count]), tuple(argv[count:])


def split_script(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Our options, and what Python is to run: from the first word on that is neither an option nor its value, from -m, or from
    - (the script comes by stdin).

    Not argparse's task: it would take a ``--`` out of the script's arguments, or stop there.

    >>> split_script(["--frames", "5", "--report=x", "train.py", "--frames", "--"])
    (('--frames', '5', '--report=x'), ('train.py', '--frames', '--'))
    """
    start = 0
    while start < len(argv) and argv[start].startswith("-") and argv[start] not in {"-m", "-"}:
        start += 1 if "=" in argv[start] or argv[start] in {"-h", "--help"} else 2
    return tuple(argv[:start]), tuple(argv[start:])


def parse_batches(text: str) -> tuple[int, ...]:
    """Batch numbers of a list with ranges.

    >>> parse_batches("1,3,10-12")
    (1, 3, 10, 11, 12)
    """
    numbers: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not 0 <= last - first < MAX_BATCHES:
            raise UsageError(f"--trace-batches holds {part!r}", hint="batch numbers and ranges, such as 1,3,10-12")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def interpreter(original: Sequence[str], arguments: int) -> tuple[str, ...]:
    """The interpreter and its own options, of a process that ``python -m dsdoctor.run`` started with so many arguments.

    >>> interpreter(["python", "-u", "-X", "dev", "-m", "dsdoctor.run", "train.py", "3"], 2)
    ('python', '-u', '-X', 'dev')
    >>> interpreter(["python", "-um", "dsdoctor.run"], 0)
    ('python', '-u')
    >>> interpreter(["python", "-m", "cProfile", "-m", "dsdoctor.run", "train.py"], 1)
    Traceback (most recent call last):
    dsdoctor.core.errors.UsageError: dsdoctor.run is not what Python was told to run
    """
    *words, last = original[: len(original) - arguments] or [""]
    if last == "dsdoctor.run" and words:
        last = words.pop() + last
    flags = last.removesuffix("mdsdoctor.run")
    ours = len(words) > 0 and flags != last and re.fullmatch("-[A-Za-z]*", flags) is not None
    if not ours or any(word in {"-m", "-c"} for word in words[1:]):
        hint = "put it first: python -m dsdoctor.run -m cProfile train.py"
        raise UsageError("Python was not started with dsdoctor.run", hint=hint)
    return (*words, *([flags] if flags != "-" else []))


def in_environment(python: Sequence[str]) -> tuple[str, ...]:
    """The interpreter's options without -E and -I, which would keep the startup folder out, and with what -I means beside them.

    >>> in_environment(["python", "-Iu", "-W", "error::EncodingWarning"])
    ('python', '-u', '-W', 'error::EncodingWarning', '-s', '-P')
    >>> in_environment(["python", "-E", "-X", "dev", "-WIGNORE"])
    ('python', '-X', 'dev', '-WIGNORE')
    """
    kept, isolated, words = [python[0]], False, iter(python[1:])
    for word in words:
        # -W and -X take what follows as their value
        letters, value = re.fullmatch("(-[A-VYZa-z]*)(.*)", word, re.DOTALL).groups()  # type: ignore[union-attr]
        isolated = isolated or "I" in letters
        left = letters.replace("E", "").replace("I", "") + value
        kept += [left] if left != "-" else []
        kept += [next(words)] if value in {"W", "X"} or word == "--check-hash-based-pycs" else []
    return (*kept, *(["-s", "-P"] if isolated else []))


def environment_for(call: CommandLine, environment: Mapping[str, str], watch: str) -> dict[str, str]:
    """The script's environment: ours, with the order and the folder that reads it.

    Under -E and -I Python's own variables are handed over in the order, so that Python itself does not see them.
    """
    ignored = {
        name: value for name, value in environment.items() if sys.flags.ignore_environment and name[:6] == "PYTHON"
    }
    environment = {name: value for name, value in environment.items() if name not in ignored}
    if os.pathsep in str(STARTUP):
        raise UsageError(f"dsdoctor is in {STARTUP}, which PYTHONPATH cannot contain", hint="install it elsewhere")
    options = None if call.options is None else asdict(call.options)
    python = f"{sys.prefix} {sys.hexversion}"
    order = RunOrder(
        python=python,
        main=NO_MAIN if call.exports else os.getpid(),
        watch=watch,
        options=options,
        config_check=call.config_check,
        memory=call.memory,
        checkpoint_check=call.checkpoint_check,
        hang=call.hang,
        ignored=ignored,
    )
    folders = [str(STARTUP), *filter(None, [environment.get("PYTHONPATH")])]
    kept = flight_recorder.recorder_variables(call.hang is not None, environment, op_compile.installed_torch())
    return {**environment, **kept, VARIABLE: order.text(), "PYTHONPATH": os.pathsep.join(folders)}


def with_given_locale(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment with the locale that this process was given: Python itself sets LC_CTYPE when it starts in the C locale
    (PEP 538), and the script's Python does so again."""
    try:
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(environment)
    others = {name: value for name, value in environment.items() if name != LC_CTYPE}
    given = [os.fsdecode(line).partition("=")[2] for line in lines if line.startswith(b"LC_CTYPE=")]
    return others | {LC_CTYPE: given[0]} if given else others


def shell_lines(environment: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """The lines that set some variables.

    >>> shell_lines({"A": "one two"}, ["A"])
    ["export A='one two'"]
    """
    return [f"export {name}={shlex.quote(environment[name])}" for name in names]


def run(argv: Sequence[str], *, python: Sequence[str], watch: str = WATCH) -> NoReturn:
    """Become the script that a command line names, or print the environment. Raises UsageError, and returns only so.

    ``python``: the interpreter and its options. ``watch``: ``module:function``, called with each engine and the options.
    """
    call = parse_command_line(argv, os.environ)
    environment = environment_for(call, os.environ, watch)
    if call.exports:
        ours = [
            name
            for name in (VARIABLE, "PYTHONPATH", *flight_recorder.VARIABLES)
            if environment.get(name) != os.environ.get(name)
        ]
        print(*shell_lines(environment, ours), sep="\n")
        raise SystemExit(0)
    # one a node: the folder may be each machine's own
    if os.environ.get("LOCAL_RANK", rank() or "0") == "0":
        say(*op_compile.stale_locks(os.environ))
    os.execve(sys.executable, [*python, *call.script], with_given_locale(environment))  # noqa: S606 - no process is started: it becomes this


def as_module(original: Sequence[str], arguments: int) -> list[str]:
    """The command line of ``dsdoctor run`` with so many arguments -> that of ``python -m dsdoctor.run``, which is the same.

    >>> as_module(["python", "-u", "/usr/bin/dsdoctor", "run", "train.py", "3"], 2)
    ['python', '-u', '-m', 'dsdoctor.run', 'train.py', '3']
    >>> as_module(["python", "-um", "dsdoctor", "run", "train.py"], 1)
    ['python', '-um', 'dsdoctor.run', 'train.py']
    """
    *python, program = original[: len(original) - arguments - 1]
    by_module = re.fullmatch("-[A-Za-z]*m", python[-1]) and program == "dsdoctor"
    words = [f"{program}.run"] if by_module or re.fullmatch("-[A-Za-z]*mdsdoctor", program) else ["-m", "dsdoctor.run"]
    return [*python, *words, *original[len(original) - arguments :]]


def start(argv: Sequence[str], original: Sequence[str]) -> NoReturn:
    """Become the script, or end with what is wrong with the command. ``original``: all words of it, the interpreter's first."""
    try:
        if sys.flags.no_site or (sys.flags.isolated and not hasattr(sys.flags, "safe_path")):
            option = "-S keeps" if sys.flags.no_site else "-I before Python 3.11 keeps"
            raise UsageError(f"Python's {option} dsdoctor out", hint="leave the option out")
        python = interpreter(original, len(argv))
        run(argv, python=in_environment(python) if sys.flags.ignore_environment else python)
    except UsageError as error:
        lines = [f"✗ {error.message}", *([f"    Fix: {error.hint}"] if error.hint else [])]
        print(*lines, sep="\n", file=sys.stderr)
        sys.exit(error.exit_code)


def main() -> NoReturn:
    """Entry point of ``python -m dsdoctor.run``."""
    start(sys.argv[1:], sys.orig_argv)


if __name__ == "__main__":
    main()
