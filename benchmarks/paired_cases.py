"""The scripts of benchmarks/paired: how each is started, and what is laid beside it."""

import shutil
import signal
import socket
import zipapp
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Prepare = Callable[[Path], None]


def zipped(folder: Path) -> None:
    """The script as an application in one file."""
    inside = folder / "inside"
    inside.mkdir()
    (folder / "plain.py").rename(inside / "__main__.py")
    zipapp.create_archive(inside, folder / "app.pyz")
    shutil.rmtree(inside)


def unzipped(folder: Path) -> None:
    (folder / "inside").mkdir()
    (folder / "plain.py").rename(folder / "inside" / "__main__.py")


def latin(folder: Path) -> None:
    text = '# -*- coding: latin-1 -*-\nname = "Grüße"\nprint(len(name), ascii(name), __file__)\n'
    (folder / "latin.py").write_bytes(text.encode("latin-1"))


def with_bom(folder: Path) -> None:
    (folder / "bom.py").write_bytes(b"\xef\xbb\xbf" + 'print(ascii("Grüße"), __doc__)\n'.encode())


def broken(folder: Path) -> None:
    (folder / "broken.py").write_text("x = 1\nif x\n    print(x)\n")


def sitecustomized(folder: Path) -> None:
    """A user's own, as coverage and some clusters put one."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(
        "import atexit, os, sys\nsys.user_came = os.environ.get('NAME', 'first')\n"
        "atexit.register(print, 'the site goes', flush=True)\n"
    )


def shadowed(folder: Path) -> None:
    """Files beside the script with the names of modules: the script's own, where Python finds them first."""
    for name in ("config", "core", "hosts", "memory", "overflow", "rules", "run", "ui", "checks", "probe"):
        (folder / f"{name}.py").write_text(f"NAME = 'my own {name}'\n")


def shadows_in_cwd(folder: Path) -> None:
    """Files with names of Python's modules in the working folder, which a script in another folder never sees."""
    (folder / "src").mkdir()
    (folder / "plain.py").rename(folder / "src" / "plain.py")
    for name in ("random", "json", "typing", "dataclasses", "signal", "socket", "argparse", "platform", "queue"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('the {name} of the working folder was imported')\n")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script and how it is started; ``start`` with RUN and the script's words filled in."""

    name: str
    script: str = ""
    start: tuple[str, ...] = ("python",)
    target: tuple[str, ...] = ()
    """What stands for the script, where that is not its file."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    stdin: str | None = None
    before: tuple[str, ...] = ()
    """Words before the command line: a shell that closes a descriptor, unshare."""
    signals: tuple[str, int] | None = None
    """A signal that is sent once the script has printed this."""
    prepare: Prepare | None = None
    needs: tuple[str, ...] = ()
    watches: tuple[str, ...] = ("default",)
    healthy: bool = True
    """Whether a verdict on stderr is a false one."""
    pauses: bool = False
    """Whether it is also run with a hang watch that asks soon."""
    refused: str = ""
    """Why dsdoctor cannot serve it, which it says before anything runs, with status 2."""
    marked: str = ""
    """What a verdict of a script that fails by design may be about."""

    @property
    def file(self) -> str:
        return self.script or f"{self.name}.py"


def free_port() -> str:
    """For one launcher: a table that is made beside another keeps its own."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])


PYTHON = ("python",)
TORCHRUN = ("torchrun", "--nproc_per_node", "2", "--master_port", free_port())
DEEPSPEED = ("deepspeed", "--num_gpus", "2", "--master_port", free_port())
ACCELERATE = (
    *("accelerate", "launch", "--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
    *("--dynamo_backend", "no", "--main_process_port", free_port()),
)
ALL = ("default", "frames")


def read_only(*words: str) -> tuple[str, ...]:
    """A shell in whose mounts the working folder is read-only."""
    shell = 'mount --bind . . && mount -o remount,ro,bind . . && cd "$PWD" && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", shell, "sh", *words)


def shell(redirection: str) -> tuple[str, ...]:
    return ("sh", "-c", f'exec "$@" {redirection}', "sh")


def plain(name: str, *options: str, **others: object) -> Case:
    """plain.py under an interpreter with these options."""
    return Case(name=name, script="plain.py", start=("python", *options), **others)  # type: ignore[arg-type]


def end(kind: str, marked: str = "", **others: object) -> Case:
    """An end that ends_with.py makes; a verdict may be about that end."""
    name = f"ends_{kind}"
    return Case(name=name, script="ends_with.py", args=(kind,), marked=marked or ".", **others)  # type: ignore[arg-type]


def signalled(name: str, number: int, *args: str, marked: str = ".") -> Case:
    return Case(
        name=f"signal_{name}", script="waits_for_signal.py", args=args, signals=("ready", number), marked=marked
    )


def ds(name: str, *args: str, watches: tuple[str, ...] = ALL, marked: str = "", healthy: bool = True) -> Case:
    """ds.py, two ranks of DeepSpeed's launcher."""
    needs = ("deepspeed",)
    return Case(
        name=name,
        script="ds.py",
        start=DEEPSPEED,
        args=args,
        watches=watches,
        needs=needs,
        marked=marked,
        healthy=healthy,
    )


def with_tiny(folder: Path) -> None:
    shutil.copy(Path(__file__).parent / "paired" / "tiny.py", folder)


PYTHON_CASES = (
    plain("plain", args=("--epochs", "3", "-v")),
    plain("path_of_the_script", target=("./../here/plain.py",)),
    plain("isolated", "-I"),
    plain("no_user_environment", "-E", "-s"),
    plain(
        "no_site", "-S", env={"PYTHONPATH": "{here}:{site}"}, refused="-S leaves out site, by which dsdoctor comes in"
    ),
    plain("safe_path", "-P"),
    plain("safe_path_variable", env={"PYTHONSAFEPATH": "1"}),
    plain("options_of_python", "-X", "utf8", "-B", "-u", "-W", "ignore::DeprecationWarning"),
    plain("optimized", "-OO"),
    plain("dev_mode", "-X", "dev"),
    plain("warnings_are_errors", "-W", "error"),
    plain("hash_seed", env={"PYTHONHASHSEED": "0"}),
    plain("locale_c", env={"LC_ALL": "C", "LANG": "C"}),
    plain("zipapp", target=("app.pyz",), prepare=zipped),
    plain("folder_with_main", target=("inside",), prepare=unzipped),
    plain("own_sitecustomize", env={"PYTHONPATH": "site:{here}", "NAME": "x"}, prepare=sitecustomized),
    plain("shadows_in_cwd", target=("src/plain.py",), prepare=shadows_in_cwd),
    plain(
        "from_stdin", target=("-", "--epochs", "3"), stdin=(Path(__file__).parent / "paired" / "plain.py").read_text()
    ),
    Case(name="module_of_package", script="package", target=("-m", "package.train", "--x", "1")),
    Case(name="package_itself", script="package", target=("-m", "package")),
    Case(name="script_inside_package", script="package", target=("package/train.py",)),
    Case(name="no_such_script", target=("nothing.py",), marked="."),
    Case(name="no_such_module", target=("-m", "nothing_there"), marked="."),
    Case(name="latin_source", target=("latin.py",), prepare=latin),
    Case(name="bom_source", target=("bom.py",), prepare=with_bom),
    Case(name="broken_source", target=("broken.py",), prepare=broken, marked="."),
    Case(name="hooks_seen"),
    Case(name="signals_seen"),
    Case(name="descriptors_seen"),
    Case(name="threads_seen"),
    Case(name="modules_seen", prepare=shadowed),
    Case(name="modules_count"),
    Case(name="random_seen", needs=("torch",)),
    Case(name="own_options", args=("--overflow", "x", "--hang", "1", "--report", "r", "--memory", "--", "--help")),
    Case(name="own_help", script="own_options.py", args=("-h",)),
    Case(name="own_excepthook"),
    Case(name="traced"),
    Case(name="traced_to_the_end"),
    Case(name="thread_fails"),
    Case(name="thread_fails_own", script="thread_fails.py", args=("--own",)),
    Case(name="ends_in_order"),
    *(end(kind) for kind in ("os_exit", "text", "number", "large_number", "none", "tuple", "chained", "grouped")),
    *(end(kind) for kind in ("keyboard", "raised_keyboard", "term", "kill", "abort", "segfault", "recursion", "deep")),
    *(end(kind) for kind in ("fork_exits", "at_exit_fails", "import_fails", "syntax", "lost_output", "base", "stop")),
    end("generator_exit"),
    signalled("term", signal.SIGTERM),
    signalled("int", signal.SIGINT),
    signalled("hup", signal.SIGHUP),
    signalled("usr1", signal.SIGUSR1),
    signalled("own_term", signal.SIGTERM, "own"),
    signalled("own_int", signal.SIGINT, "own"),
    signalled("own_usr2", signal.SIGUSR2, "own"),
    Case(name="children"),
    Case(name="closes_all"),
    Case(name="daemonizes"),
    Case(name="executes_itself"),
    Case(name="stdin_read", stdin="one\ntwo\n"),
    Case(name="stdin_asked", script="stdin_read.py", args=("--ask",), stdin="one\n", marked="."),
    Case(name="closed_stdin", script="no_stdin.py", before=shell("<&-")),
    Case(name="closed_stderr", script="no_stdin.py", before=shell("2>&-")),
    Case(name="closed_stderr_fails", script="no_stdin.py", args=("--fail",), before=shell("2>&-"), marked="."),
    Case(name="closed_all_three", script="no_stdin.py", before=shell("<&- >out.txt 2>&-")),
    Case(name="reader_gone", script="plain.py", before=("sh", "-c", '"$@" | head -c 1; true', "sh")),
    Case(name="read_only_cwd", script="plain.py", before=read_only()),
    Case(name="pickles"),
    Case(name="pools"),
    Case(name="logs"),
    Case(name="stdout_replaced"),
    Case(name="stderr_replaced_fails", script="stdout_replaced.py", args=("--fail",), marked="."),
    Case(name="collector"),
    Case(name="limits"),
    Case(name="own_faulthandler"),
    Case(name="own_faulthandler_exits", script="own_faulthandler.py", args=("--exit",), marked="."),
    Case(name="alarms"),
    Case(name="moves_away"),
)
TORCH_CASES = (
    Case(name="compiled", needs=("torch",)),
    Case(name="spawned", needs=("torch",)),
    Case(name="spawned_fails", script="spawned.py", args=("fail",), needs=("torch",), marked="."),
    Case(name="loaders", needs=("torch",)),
    Case(name="anomalies", needs=("torch",)),
    Case(name="ddp", start=TORCHRUN, needs=("torch",), pauses=True),
    Case(name="fsdp", start=TORCHRUN, needs=("torch",), pauses=True),
    Case(name="pauses", start=TORCHRUN, needs=("torch",), pauses=True, marked="rank [01]"),
    Case(name="rank_seen", start=TORCHRUN, needs=("torch",)),
    *(
        Case(
            name=f"rank_ends_{kind}",
            script="rank_ends.py",
            args=(kind,),
            start=TORCHRUN,
            needs=("torch",),
            marked=marked,
        )
        for kind, marked in (
            *((kind, "") for kind in ("usr2", "usr1", "waits", "os_exit", "thread_raises", "no_stderr")),
            *((kind, "") for kind in ("closed_stderr", "moved", "cleared", "no_destroy")),
            *((kind, ".") for kind in ("number", "replaced")),
        )
    ),
    Case(
        name="rank_interrupted",
        script="pauses.py",
        start=TORCHRUN,
        needs=("torch",),
        signals=("1 1 ", signal.SIGINT),
        marked=".",
    ),
    *(
        Case(
            name=f"one_rank_{kind}",
            script="fails_on_one.py",
            args=(kind,),
            start=TORCHRUN,
            needs=("torch",),
            marked=".",
        )
        for kind in ("raises", "exits", "killed")
    ),
)
DEEPSPEED_CASES = (
    ds("ds0", "--stage", "0"),
    ds("ds0_bf16", "--stage", "0", "--dtype", "bf16"),
    ds("ds1_bf16", "--stage", "1", "--dtype", "bf16", watches=("default", "frames", "trace")),
    ds("ds2", "--stage", "2", "--accumulate", "2"),
    ds("ds2_fp16", "--stage", "2", "--dtype", "fp16"),
    ds("ds3", "--stage", "3"),
    ds("ds3_bf16_saves", "--stage", "3", "--dtype", "bf16", "--save"),
    ds("ds1_saves", "--stage", "1", "--save"),
    ds("ds0_compiled", "--stage", "0", "--compile"),
    ds("ds2_fails", "--stage", "2", "--fail", "1", marked="."),
    Case(name="ds_pipeline", start=DEEPSPEED, watches=ALL, needs=("deepspeed",)),
    Case(name="ds_uses", start=TORCHRUN, watches=(*ALL, "trace"), needs=("deepspeed",)),
    Case(name="ds_moe", start=TORCHRUN, watches=ALL, needs=("deepspeed",)),
)
FRAMEWORK_CASES = (
    Case(name="trainer", args=("--resume",), prepare=with_tiny, needs=("transformers",)),
    Case(name="trainer_ddp", script="trainer.py", start=TORCHRUN, prepare=with_tiny, needs=("transformers",)),
    *(
        Case(
            name=f"trainer_ds{stage}",
            script="trainer.py",
            args=("--stage", str(stage), *more),
            start=TORCHRUN,
            prepare=with_tiny,
            needs=("transformers", "deepspeed"),
            watches=ALL,
        )
        for stage, more in ((2, ()), (3, ("--bf16",)))
    ),
    Case(name="accelerated", start=ACCELERATE, needs=("accelerate",)),
    Case(
        name="accelerated_ds2",
        script="accelerated.py",
        start=("torchrun", "--nproc_per_node", "1", "--master_port", free_port()),
        args=("--deepspeed", "2"),
        watches=ALL,
        needs=("accelerate", "deepspeed"),
    ),
    Case(name="peft_lora", prepare=with_tiny, needs=("peft",)),
    Case(name="trl_sft", prepare=with_tiny, needs=("trl",)),
    Case(name="trl_dpo", prepare=with_tiny, needs=("trl",)),
    Case(name="lit", needs=("lightning",)),
    Case(name="lit_ddp", script="lit.py", args=("2",), needs=("lightning",)),
)
CASES = (*PYTHON_CASES, *TORCH_CASES, *DEEPSPEED_CASES, *FRAMEWORK_CASES)
