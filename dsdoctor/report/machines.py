"""A built DeepSpeed, wheels to choose from, or the differences between machines -> lines."""

from collections.abc import Iterable, Iterator

from dsdoctor.checks.compare import FactDifference
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import DeepSpeed
from dsdoctor.core.text import and_more

FEW = 4


def built_lines(built: DeepSpeed) -> Iterator[str]:
    """What a wheel or an installed DeepSpeed says of itself."""
    yield f"DeepSpeed {built.version} in {built.location}"
    made = [("for", ", ".join((*built.python, *built.platform))), ("accelerator", built.accelerator)]
    made += [("torch", built.torch), ("CUDA", built.cuda), ("glibc", built.glibc), ("libstdc++", built.glibcxx)]
    yield "    " + ", ".join(f"{name} {value}" for name, value in made if value)
    yield f"    ops: {', '.join(built.present_ops or built.installed_ops) or 'none'}"
    inside = sorted({name for names in built.sm_arch.values() for name in names})
    if inside:
        yield f"    GPU code: {', '.join(inside)}"
    march = [flag for flag in built.cpu_flags if flag.startswith(("-march", "-mcpu"))]
    if march:
        yield f"    processor code: {' '.join(march)}"


def candidate_lines(found: Iterable[tuple[str, bool, tuple[Finding, ...]]], install: str | None) -> Iterator[str]:
    """One line for each wheel, the best first, with what stands in the way; then the command that installs the best."""
    for number, (wheel, fits, findings) in enumerate(found):
        against = [finding.title for finding in findings if finding.severity is Severity.ERROR]
        yield f"{('✓' if number == 0 else ' ') if fits else '✗'} {wheel.rpartition('/')[2]}"
        yield from (f"    {title}" for title in against)
    yield f"$ {install}" if install else "✗ none of them fits this machine"


def difference_lines(differences: Iterable[FactDifference], machines: int) -> Iterator[str]:
    """One line for each fact: the machines that differ, then the others."""
    differences = tuple(differences)
    for difference in differences:
        *few, most = difference.groups
        shown = "; ".join(f"{and_more(group.machines, FEW)}: {group.value or 'not there'}" for group in few)
        others = f"the other {len(most.machines)}" if len(most.machines) > 1 else most.machines[0]
        yield f"! {difference.fact}: {shown}; {others}: {most.value or 'not there'}"
    if not differences:
        yield f"✓ the {machines} machines do not differ"
