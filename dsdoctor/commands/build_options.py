"""A build order -> the build-wheel command that carries it out."""

import sys
from collections.abc import Iterator

from dsdoctor.core.finding import Step, step, with_options
from dsdoctor.core.requests import BuildOrder, BuildRequest

BUILD = step("python -m dsdoctor build-wheel")
THERE = step("python -m dsdoctor build-wheel", note="on the machine of that snapshot")


def build_command(order: BuildOrder) -> Step:
    """With every option that was given. For another machine's snapshot it is typed there, with a Python of that machine."""
    return with_options(BUILD if order.machine is None else THERE, _options(order))


def _options(order: BuildOrder) -> Iterator[Step]:
    if order.config is not None:
        yield step("--for {config}", config=str(order.config))
    if order.source is not None:
        yield step("--source {source}", source=order.source)
    for node in order.nodes:
        yield step("--node {file}", file=str(node))
    if order.machine is None and order.python != sys.executable:
        yield step("--python {python}", python=order.python)
    yield from _of_request(order.request)


def _of_request(request: BuildRequest) -> Iterator[Step]:
    if request.ops is not None and not request.ops_because:
        yield step("--ops {ops}", ops=",".join(request.ops))
    if request.arch is not None:
        yield step("--arch {architectures}", architectures=request.arch)
    if request.accelerator is not None:
        yield step("--accelerator {accelerator}", accelerator=request.accelerator)
    if request.cpu is not None:
        yield step("--cpu {level}", level=request.cpu)
    if request.toolkit != "auto":
        yield step("--toolkit {toolkit}", toolkit=request.toolkit)
    if request.jobs is not None:
        yield step("--jobs {jobs}", jobs=request.jobs)
    if request.local_version is not None:
        yield step("--local-version={version}", version=request.local_version)
    if request.no_local_version:
        yield step("--no-local-version")
    if request.offline:
        yield step("--offline")
    if request.debug_info:
        yield step("--debug-info")
