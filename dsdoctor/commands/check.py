"""The hall of check: begins to look, and has what judges imported while the machine answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dsdoctor.core.build_models import CheckRequest
from dsdoctor.core.errors import DoctorError
from dsdoctor.core.finding import for_python
from dsdoctor.core.host import LocalHost
from dsdoctor.core.workspace import cache_folder
from dsdoctor.probe import Probing

if TYPE_CHECKING:
    from dsdoctor.commands.check_ops import Checked
    from dsdoctor.commands.observe import Observation
    from dsdoctor.core.build_models import Source


def check(question: CheckRequest, *, say: Callable[[str], None]) -> Checked:
    """Look at a machine and judge it; with ``deep`` ask the compiler. Raises UsageError for an unknown op or rule."""
    checked = _check(question, say)
    if question.machine or question.python == sys.executable:
        return checked
    topics = (replace(t, findings=tuple(for_python(f, question.python) for f in t.findings)) for t in checked.topics)
    return replace(checked, topics=tuple(topics))


def _check(question: CheckRequest, say: Callable[[str], None]) -> Checked:
    if question.deep:
        from dsdoctor.commands.check_ops import deep

        return deep(question, say)
    observation, source = _looked(question, say)
    from dsdoctor.checks import examine
    from dsdoctor.commands.check_ops import judged, without_table

    topics = examine(observation.machine, rules=question.rules)
    if isinstance(source, DoctorError):
        if question.source or question.request.ops:
            # an op or a source that was named and is none is the user's; else the findings stand without the table
            raise source
        return without_table(observation.machine, topics, source)
    if source is None:
        return without_table(observation.machine, topics, None)
    return judged(observation, topics, source, question, {})


def _looked(question: CheckRequest, say: Callable[[str], None]) -> tuple[Observation, Source | DoctorError | None]:
    """The machine, and the ops, an error instead of them, or None where only some checks were asked for."""
    if question.machine:
        from dsdoctor.commands.observe import observe

        observation = observe(question.python, question.machine, whole=True)
        return observation, _source(observation, question, say)
    host = LocalHost()
    cache = str(cache_folder(host))
    with Probing(host, python=question.python, cache=cache, whole=False) as probing:
        # imports take as long as the answers: they go side by side, and the ops are asked while torch is being loaded
        from dsdoctor.commands.observe import Observation

        source = _source(Observation(machine=probing.early(), cache=cache), question, say)
        return Observation(machine=probing.final(), cache=cache), source


def _source(
    observation: Observation, question: CheckRequest, say: Callable[[str], None]
) -> Source | DoctorError | None:
    from dsdoctor.commands.observe import source_at_hand

    try:
        return None if question.rules else source_at_hand(observation, question.source, question.request, say=say)
    except DoctorError as error:
        return error
