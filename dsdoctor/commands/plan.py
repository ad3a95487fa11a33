"""A build order and what was seen of the machine -> a plan, with a DeepSpeed tree in a throw-away folder. Compiles nothing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.builder.cache.store import CacheStore
from dsdoctor.builder.plan.choices import accelerator_of
from dsdoctor.builder.plan.plan import plan_build
from dsdoctor.builder.source.fetch import lay_out, spell_source
from dsdoctor.builder.source.op_config import ops_of_config, read_config
from dsdoctor.commands.cache import open_store
from dsdoctor.commands.observe import Observation, read_nodes
from dsdoctor.commands.offers import offers_for
from dsdoctor.commands.source import described, recorded_source
from dsdoctor.core.build_models import BuildPlan, Source
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.requests import BuildOrder, BuildRequest
from dsdoctor.core.workspace import cache_folder, private_folder, workspace


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with all that carrying it out needs; ``folder`` goes away when the context ends, ``store`` keeps compiled ops."""

    host: LocalHost
    machine: Machine
    source: Source
    plan: BuildPlan
    folder: Path
    cache: Path
    store: CacheStore | None


@contextmanager
def planned(order: BuildOrder, observation: Observation) -> Iterator[Planned]:
    """Lay the source out in a throw-away folder, ask it for its ops, and decide."""
    host, machine = LocalHost(), observation.machine
    request = replace(order.request, nodes=read_nodes(order.nodes))
    accelerator = accelerator_of(machine, request)
    request = _with_config(request, order.config, accelerator)
    cache = private_folder(cache_folder(host))
    with workspace(cache) as folder:
        source = _source(host, observation, order, accelerator, folder, cache)
        plan = plan_build(machine, source, request, cache=observation.cache, offers=offers_for(observation, request))
        store = open_store(host) if order.cache else None
        yield Planned(host=host, machine=machine, source=source, plan=plan, folder=folder, cache=cache, store=store)


def _source(
    host: LocalHost, observation: Observation, order: BuildOrder, accelerator: str, folder: Path, cache: Path
) -> Source:
    if observation.snapshot is not None and not order.source:
        return recorded_source(observation.snapshot, accelerator)
    machine = observation.machine
    spec, because = spell_source(order.source, machine.deepspeed)
    python = machine.python.executable if observation.is_here and machine.python else sys.executable
    laid = lay_out(host, spec, folder / "source", cache=cache, python=python, offline=order.request.offline)
    return described(observation, replace(laid, because=because), accelerator, folder)


def _with_config(request: BuildRequest, config: Path | None, accelerator: str) -> BuildRequest:
    """The request with the ops that a ds_config.json names."""
    if config is None:
        return request
    ops = ops_of_config(read_config(config), accelerator=accelerator)
    return replace(request, ops=ops or None, ops_because=f"--for {config}")
