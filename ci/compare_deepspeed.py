"""Compares a DeepSpeed tree with the one that dsdoctor's tables were written for: what changed, and what the tables do not know.

    python ci/compare_deepspeed.py BASE TREE [--name NAME]

BASE and TREE are DeepSpeed source trees; what can build is asked of each tree's own op_builder (torch must be installed), the rest
is read. The comparison goes to stdout, as Markdown. ci/upstream fetches the trees and calls it.
Exit status: 0 dsdoctor's tables hold for TREE, 1 they do not, 2 usage.
"""

import argparse
import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from dsdoctor.builder.source.fetch import LaidOut
from dsdoctor.builder.source.op_loads import LOADS, NOT_BY_CONFIG, LoadSite, find_load_sites, unknown_sites
from dsdoctor.builder.source.ops import OPS, describe
from dsdoctor.builder.source.training_config import FORMER_OPTIMIZERS, OPTIMIZERS
from dsdoctor.core.architectures import KNOWN, numeric
from dsdoctor.core.build_models import OpFact
from dsdoctor.core.errors import DoctorError
from dsdoctor.core.host import LocalHost
from dsdoctor.diagnosis.catalogue import CLUES
from dsdoctor.diagnosis.facts import op_of

ACCELERATORS = ("cuda", "cpu")
READ = re.compile(r"(?:environ(?:\.get\(|\.setdefault\(|\.pop\(|\[)|getenv\()\s*f?[\"']([A-Z][A-Z0-9_]{2,})[\"']")
NAMED = re.compile(r"[\"'](DS_[A-Z0-9_]+)[\"']")
FORMER = {"sparse_attn"}
"""Ops of older releases, which dsdoctor still builds."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A DeepSpeed as far as dsdoctor depends on it. ``ops``: by accelerator and name; a text is why they could not be asked."""

    version: str
    ops: Mapping[str, Mapping[str, OpFact] | str]
    variables: frozenset[str]
    sites: tuple[LoadSite, ...]
    optimizers: frozenset[str]


def read_tree(folder: Path) -> Tree:
    """Ask and read a tree."""
    return Tree(
        version=(folder / "version.txt").read_text(encoding="utf-8").strip(),
        ops={accelerator: _asked_ops(folder, accelerator) for accelerator in ACCELERATORS},
        variables=frozenset(_variables(folder)),
        sites=find_load_sites(folder),
        optimizers=frozenset(_optimizers(folder / "deepspeed" / "runtime" / "config.py")),
    )


def _ops(folder: Path, accelerator: str) -> dict[str, OpFact] | str:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    source = describe(
        LocalHost(),
        LaidOut(folder=folder, asked=str(folder), commit=None),
        accelerator=accelerator,
        python=sys.executable,
        torch=str(Path(spec.origin).parent),
        architectures=numeric(KNOWN),
    )
    return {fact.op: fact for fact in source.ops}


def _asked_ops(folder: Path, accelerator: str) -> dict[str, OpFact] | str:
    try:
        return _ops(folder, accelerator)
    except DoctorError as error:
        return error.message


def _variables(folder: Path) -> Iterator[str]:
    """Those that are read where ops are built, and DeepSpeed's own anywhere."""
    building = [folder / "setup.py", *(folder / "op_builder").rglob("*.py"), *(folder / "accelerator").rglob("*.py")]
    for path in building:
        yield from READ.findall(path.read_text(encoding="utf-8", errors="replace"))
    # in a checkout deepspeed/ops/op_builder is a link, which is not followed
    for path in (*building, *(folder / "deepspeed").rglob("*.py")):
        yield from NAMED.findall(path.read_text(encoding="utf-8", errors="replace"))


def _optimizers(config: Path) -> Iterator[str]:
    """The values of <NAME>_OPTIMIZER."""
    for node in ast.parse(config.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if any(name.endswith("_OPTIMIZER") for name in names):
                yield str(node.value.value)


def changes(base: Tree, tree: Tree) -> Iterator[str]:
    """What differs, as Markdown."""
    for accelerator in ACCELERATORS:
        before, after = base.ops[accelerator], tree.ops[accelerator]
        if isinstance(before, str) or isinstance(after, str):
            yield from _section(
                f"ops for {accelerator}", [f"not asked: {before if isinstance(before, str) else after}"]
            )
            continue
        yield from _section(f"ops for {accelerator}", _of_names(before, after))
        both = [name for name in before if name in after]
        yield from _section(
            f"builders for {accelerator}", [line for name in both for line in _of_op(before[name], after[name])]
        )
    yield from _section("variables", _of_names(base.variables, tree.variables))
    yield from _section("loader calls", _of_names(map(_shown, base.sites), map(_shown, tree.sites)))
    yield from _section("optimizers", _of_names(base.optimizers, tree.optimizers))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    told = list(lines)
    yield f"\n### {title}: {'as before' if not told else ''}".rstrip()
    yield from (f"- {line}" for line in told)


def _of_names(before: Iterable[str], after: Iterable[str]) -> list[str]:
    old, new = set(before), set(after)
    return [*(f"new: `{name}`" for name in sorted(new - old)), *(f"gone: `{name}`" for name in sorted(old - new))]


def _of_op(before: OpFact, after: OpFact) -> Iterator[str]:
    for field in fields(OpFact):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old == new:
            continue
        if isinstance(old, tuple) and isinstance(new, tuple):
            told = "; ".join(_of_names(old, new)) or "another order"
        else:
            told = f"`{old}` -> `{new}`"
        yield f"{after.op}, {field.name}: {told}"


def _shown(site: LoadSite) -> str:
    return f"{site.op}: {site.file}, {site.function or 'module'}"


def unknown_to_us(tree: Tree) -> Iterator[str]:
    """What of a tree dsdoctor's own tables do not know, or know otherwise."""
    for check in CHECKS:
        yield from check(tree)


def _sites_unknown(tree: Tree) -> Iterator[str]:
    for site in unknown_sites(tree.sites):
        yield f"op_loads.py has no record of {_shown(site)}: `{site.line}`"


def _sites_gone(tree: Tree) -> Iterator[str]:
    there = {(site.file, site.function, site.op) for site in tree.sites}
    for load in LOADS:
        if (load.file, load.function, load.op) not in there:
            yield f"op_loads.py: {_shown(load.site)} is not there"
    for place in NOT_BY_CONFIG:
        if not any(site.file.startswith(place) for site in tree.sites):
            yield f"op_loads.py: nothing below {place} loads an op"


def _ops_in_the_catalogue(tree: Tree) -> Iterator[str]:
    known = {name for ops in tree.ops.values() if not isinstance(ops, str) for name in ops}
    for op in OPS:
        if known and op.name not in known | FORMER:
            yield f"op_catalogue.py has {op.name}, and there is no such op"


def _variables_in_logs(tree: Tree) -> Iterator[str]:
    in_logs = {word.removeprefix("ds_build_") for clue in CLUES if clue.name == "asked" for word in clue.words.split()}
    facts = {fact.op: fact for ops in tree.ops.values() if not isinstance(ops, str) for fact in ops.values()}
    for name, fact in sorted(facts.items()):
        short = fact.variable.removeprefix("DS_BUILD_")
        if name != "deepspeed_not_implemented" and (op_of(short) != name or short.lower() not in in_logs):
            yield f"rules/forms/facts.toml does not know that {fact.variable} builds {name}"


def _optimizers_known(tree: Tree) -> Iterator[str]:
    for name in sorted(tree.optimizers - {*OPTIMIZERS, *FORMER_OPTIMIZERS}):
        yield f"training_config.py does not know the optimizer {name}"


def _ops_answered(tree: Tree) -> Iterator[str]:
    for accelerator, ops in tree.ops.items():
        if isinstance(ops, str):
            yield f"the ops for {accelerator} could not be asked: {ops}"


CHECKS: tuple[Callable[[Tree], Iterator[str]], ...] = (
    _ops_answered,
    _sites_unknown,
    _sites_gone,
    _ops_in_the_catalogue,
    _variables_in_logs,
    _optimizers_known,
)


def main() -> int:
    """Print the comparison."""
    arguments = argparse.ArgumentParser(prog="ci/compare_deepspeed.py", description=__doc__)
    arguments.add_argument("base", type=Path)
    arguments.add_argument("tree", type=Path)
    arguments.add_argument("--name", default="", help="what TREE is, for the heading")
    given = arguments.parse_args()
    base, tree = read_tree(given.base.resolve()), read_tree(given.tree.resolve())
    print(f"## {given.name or given.tree}: DeepSpeed {tree.version}, against {base.version}")
    print("\n".join(changes(base, tree)))
    problems = list(unknown_to_us(tree))
    print(f"\n### dsdoctor's tables: {'they hold' if not problems else ''}".rstrip())
    print("".join(f"- {problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
