"""The outcome of a push on each node -> lines: one for each node, each finding once with its nodes, the count."""

from collections.abc import Iterator
from dataclasses import replace

from dsdoctor.core.finding import Finding
from dsdoctor.core.text import and_more
from dsdoctor.push.models import Delivered, NodeState, Present
from dsdoctor.ui.terminal import finding_lines

MARKS = {NodeState.INSTALLED: "✓", NodeState.VERIFIED: "✓"}
FEW = 4


def push_lines(wheel: str, nodes: tuple[Delivered, ...], *, dry_run: bool) -> Iterator[str]:
    """The outcome of a push, ``wheel`` being the name of its file."""
    width = max((len(node.host) for node in nodes), default=0)
    for node in nodes:
        mark = MARKS.get(node.state, "✗")
        told = "; ".join(filter(None, (_state(node), _left(node))))
        yield f"{mark} {node.host:<{width}}  {told}  ({node.seconds:.0f} s)"
    yield from finding_lines(findings_of(nodes))
    wanted = NodeState.VERIFIED if dry_run else NodeState.INSTALLED
    have = sum(node.state is wanted for node in nodes)
    verb = "fits" if dry_run else "is on"
    every = (
        f"{have} of {len(nodes)} nodes" if have < len(nodes) else f"all {len(nodes)} nodes" if have > 1 else "the node"
    )
    yield f"{'✓' if have == len(nodes) else '✗'} {wheel} {verb} {every}"


def findings_of(nodes: tuple[Delivered, ...]) -> tuple[Finding, ...]:
    """The findings of all nodes, each once, its title with the nodes that have it."""
    hosts: dict[str, list[str]] = {}
    found: dict[str, Finding] = {}
    for node in nodes:
        for finding in node.findings:
            # the nodes of a cluster are alike, so the same problem on many is one finding
            key = f"{finding.rule} {finding.title}"
            found.setdefault(key, finding)
            hosts.setdefault(key, []).append(node.host)
    return tuple(
        replace(finding, title=f"{and_more(hosts[key], FEW)}: {finding.title}") for key, finding in found.items()
    )


def _state(node: Delivered) -> str:
    if node.state is NodeState.INSTALLED:
        return "it is there already" if node.already else "installed"
    if node.state is NodeState.REFUSED:
        return "refused: dsdoctor verify finds an error there"
    if node.state is NodeState.VERIFIED:
        return "verified, not installed"
    return node.state.value if node.state is NodeState.UNREACHABLE else f"failed at the step {node.step.value}"


def _left(node: Delivered) -> str:
    """What is there now, or was before."""
    if node.state is NodeState.INSTALLED:
        return "" if node.already else f"before: {_name(node.before)}"
    if node.state is NodeState.UNREACHABLE:
        return ""
    return f"it has {_name(node.now)}" if node.known else "what it has now is not known"


def _name(present: Present | None) -> str:
    if present is None:
        return "no DeepSpeed"
    return (
        f"DeepSpeed {present.version}" if present.version else f"a DeepSpeed without its records in {present.location}"
    )
