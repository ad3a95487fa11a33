"""The hall between the rooms: joins probe and builder for the command line. Acts through them, shows nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsdoctor.architectures import KNOWN, numeric
from dsdoctor.builder.choices import accelerator_of
from dsdoctor.builder.compile import Watch
from dsdoctor.builder.dsconfig import ops_of_config, read_config
from dsdoctor.builder.make import Bench, make, prepare_out
from dsdoctor.builder.nouns import BuildPlan, BuildResult, Source, Wish
from dsdoctor.builder.op_facts import describe
from dsdoctor.builder.pip import install_wheel
from dsdoctor.builder.plan import plan_build, plan_toolkit
from dsdoctor.builder.source import lay_out, spell_source
from dsdoctor.builder.toolkit import assemble
from dsdoctor.builder.workspace import cache_folder, log_folder, private_folder, workspace
from dsdoctor.errors import BuildFailed
from dsdoctor.finding import Finding, Fix, Severity, has_error
from dsdoctor.host import LocalHost
from dsdoctor.machine import Machine
from dsdoctor.probe import probe

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the command line asks of us."""

    python: str
    source: str | None = None
    config: Path | None = None
    wish: Wish = field(default_factory=Wish)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with everything that carrying it out needs; ``folder`` goes away when the context ends."""

    host: LocalHost
    machine: Machine
    source: Source
    plan: BuildPlan
    folder: Path
    cache: Path


Job = Callable[[Planned, BuildResult], tuple[Finding, ...]]
"""Something to do with a built wheel; what goes wrong is a finding, the wheel stays."""


def look(order: Order) -> Machine:
    """Ask this machine everything."""
    host = LocalHost()
    named = order.wish.toolkit if order.wish.toolkit not in {"auto", "pypi"} else ""
    return probe(host, python=order.python, cache=str(cache_folder(host)), toolkit=named)


@contextmanager
def planned(order: Order) -> Iterator[Planned]:
    """Look, lay the source out in a throw-away folder, and decide."""
    host, machine = LocalHost(), look(order)
    cache = private_folder(cache_folder(host))
    accelerator = accelerator_of(machine, order.wish)
    assert machine.python is not None
    spec, because = spell_source(order.source, machine.deepspeed)
    with workspace(cache) as folder:
        tree, python = folder / "source", machine.python.executable
        laid = lay_out(host, spec, tree, cache=cache, python=python, offline=order.wish.offline)
        laid = replace(laid, because=because)
        known = tuple(dict.fromkeys((*KNOWN, *(machine.torch.known_architectures if machine.torch else ()))))
        torch = machine.torch.location if machine.torch else ""
        source = describe(host, laid, accelerator=accelerator, python=python, torch=torch, architectures=numeric(known))
        plan = plan_build(machine, source, _with_config(order, accelerator), cache=str(cache))
        yield Planned(host=host, machine=machine, source=source, plan=plan, folder=folder, cache=cache)


def build(ready: Planned, out: Path, *, say: Say, watch: Watch) -> BuildResult:
    """Carry a plan out."""
    prepare_out(out)
    bench = Bench(folder=ready.folder, logs=log_folder(ready.cache), out=out)
    say(f"logs: {bench.logs}")
    return make(ready.host, ready.plan, ready.source, ready.machine, bench, say=say, watch=watch)


def install(ready: Planned, made: BuildResult) -> tuple[Finding, ...]:
    """Install a built wheel into the environment it was built for; a finding when that fails: the wheel stays."""
    assert made.wheel is not None
    try:
        install_wheel(ready.host, ready.plan.python, made.wheel)
    except BuildFailed as error:
        fix = Fix(text="install it by hand", commands=(error.hint,))
        return (Finding(rule="wheel-not-installed", severity=Severity.ERROR, title=error.message, fix=fix),)
    return ()


def assemble_toolkit(order: Order, *, say: Say) -> tuple[str | None, tuple[Finding, ...]]:
    """The root of a toolkit that fits this torch, made when there is none; findings where that cannot be."""
    host, machine = LocalHost(), look(order)
    cache = private_folder(cache_folder(host))
    advice = plan_toolkit(machine, order.wish, str(cache))
    toolkit, compiler = advice.toolkit, advice.compiler
    if has_error(advice.findings) or toolkit is None or compiler is None or compiler.c_path is None:
        return None, advice.findings
    if toolkit.assemble:
        assert machine.python is not None
        python, architectures = machine.python.executable, advice.architectures
        assemble(host, toolkit, python=python, architectures=architectures, compiler=compiler.c_path, say=say)
    return toolkit.root, advice.findings


def _with_config(order: Order, accelerator: str) -> Wish:
    if order.config is None:
        return order.wish
    ops = ops_of_config(read_config(order.config), accelerator=accelerator)
    return replace(order.wish, ops=ops or None, ops_because=f"--for {order.config}")
