"""A check: observe the machine, run the checks, judge the ops, weigh the findings by the op table. Shows nothing itself.

What judges is imported while the machine answers: imports take as long as the answers do.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from dsdoctor.core.errors import DoctorError, UsageError
from dsdoctor.core.finding import for_python
from dsdoctor.core.requests import CheckRequest
from dsdoctor.probe.observe import Observation, Probe, Say

if TYPE_CHECKING:
    from dsdoctor.builder.checked import Checked
    from dsdoctor.core.build_models import Source


def check(request: CheckRequest, *, say: Say) -> Checked:
    """Look at a machine and judge it; with ``deep`` ask the compiler. Raises UsageError for an unknown op or rule."""
    checked = _deep(request, say) if request.deep else _by_facts(request, say)
    if request.machine or request.python == sys.executable:
        return checked
    topics = (replace(t, findings=tuple(for_python(f, request.python) for f in t.findings)) for t in checked.topics)
    return replace(checked, topics=tuple(topics))


def _by_facts(request: CheckRequest, say: Say) -> Checked:
    with Probe(request.python, request.machine, whole=request.machine is not None) as observing:
        # the ops are asked while torch is being loaded
        source = _source(observing.early(), request, say)
        from dsdoctor.builder.checked import weighed, without_table
        from dsdoctor.checks import examine

        observation = _for_architectures(observing.final(), request)
    topics = examine(observation.machine, rules=request.rules)
    if isinstance(source, DoctorError) and (request.source or request.request.ops):
        # an op or a source that was named and is none is the user's; else the findings stand without the table
        raise source
    if source is None or isinstance(source, DoctorError):
        return without_table(observation.machine, topics, source)
    return weighed(observation, topics, source, request.request, {})


def _deep(request: CheckRequest, say: Say) -> Checked:
    """Look at this machine whole and ask its compiler. Raises UsageError for a snapshot, which has none."""
    from dsdoctor.builder.checked import asked_of_compiler, weighed
    from dsdoctor.builder.source.ops import source_at_hand
    from dsdoctor.checks import examine
    from dsdoctor.core.host import LocalHost
    from dsdoctor.core.workspace import cache_folder, private_folder, workspace

    if request.machine:
        raise UsageError("--deep needs a compiler, and a snapshot has none", hint="run it on that machine")
    with Probe(request.python, whole=True) as observing:
        observation = _for_architectures(observing.final(), request)
    topics = examine(observation.machine, rules=request.rules)
    with workspace(private_folder(cache_folder(LocalHost()))) as folder:
        source = source_at_hand(observation, request.source, request.request, say=say, folder=folder)
        compiled = asked_of_compiler(observation.machine, source, request.request, folder, say)
        return weighed(observation, topics, source, request.request, compiled)


def _for_architectures(observation: Observation, request: CheckRequest) -> Observation:
    """The machine as it would be with --arch in TORCH_CUDA_ARCH_LIST, which is what a build would be given."""
    arch = request.request.arch
    if not arch:
        return observation
    variables = {**observation.machine.variables, "TORCH_CUDA_ARCH_LIST": arch}
    return replace(observation, machine=replace(observation.machine, variables=variables))


def _source(observation: Observation, request: CheckRequest, say: Say) -> Source | DoctorError | None:
    """The ops, an error instead of them, or None where only some checks were asked for."""
    from dsdoctor.builder.source.ops import source_at_hand

    try:
        return None if request.rules else source_at_hand(observation, request.source, request.request, say=say)
    except DoctorError as error:
        return error
