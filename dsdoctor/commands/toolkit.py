"""An order -> a CUDA toolkit that fits this torch, assembled where there is none."""

from dsdoctor.builder.plan.plan import plan_toolkit
from dsdoctor.builder.toolkit.assemble import assemble
from dsdoctor.commands.observe import Say, observing_for
from dsdoctor.core.finding import Finding, has_error
from dsdoctor.core.host import LocalHost
from dsdoctor.core.requests import BuildOrder
from dsdoctor.core.workspace import cache_folder, private_folder


def assemble_toolkit(order: BuildOrder, *, say: Say) -> tuple[str | None, tuple[Finding, ...]]:
    """The root of a toolkit that fits this torch, made when there is none; findings where that cannot be."""
    with observing_for(order) as observing:
        observation = observing.final()
    machine = observation.machine
    private_folder(cache_folder(LocalHost()))
    advice = plan_toolkit(machine, order.request, observation.cache)
    toolkit, compiler = advice.toolkit, advice.compiler
    if has_error(advice.findings) or toolkit is None or compiler is None or compiler.c_path is None:
        return None, advice.findings
    if toolkit.assemble:
        assert machine.python is not None
        python, architectures = machine.python.executable, advice.architectures
        assemble(LocalHost(), toolkit, python=python, architectures=architectures, compiler=compiler.c_path, say=say)
    return toolkit.root, advice.findings
