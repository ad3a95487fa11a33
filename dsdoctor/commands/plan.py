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
from dsdoctor.builder.source.load_sites import find_load_sites
from dsdoctor.builder.source.op_config import ops_of_config, unknown_sites
from dsdoctor.builder.source.training_config import TrainingConfig, read_config, training_configs
from dsdoctor.commands.cache import open_store
from dsdoctor.commands.offers import offers_for
from dsdoctor.commands.source import described, recorded_source
from dsdoctor.core.build_models import BuildPlan, Source
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.requests import BuildOrder, BuildRequest
from dsdoctor.core.workspace import cache_folder, private_folder, workspace
from dsdoctor.probe.observe import Observation, read_nodes


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
    decided = _decided(order.config)
    cache = private_folder(cache_folder(host))
    with workspace(cache) as folder:
        source = _source(host, observation, order, accelerator, folder, cache)
        request = _with_config(request, order.config, decided, source)
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
    because = laid.limit or because
    return described(observation, replace(laid, because=because), accelerator, folder)


def _decided(config: Path | None) -> tuple[TrainingConfig, ...]:
    """What a ds_config.json decides; an error in it is found before anything is fetched."""
    return training_configs(read_config(config), name=str(config)) if config else ()


def _with_config(
    request: BuildRequest, config: Path | None, decided: tuple[TrainingConfig, ...], source: Source
) -> BuildRequest:
    """The request with the ops that a ds_config.json decides, and the reason for each."""
    if config is None:
        return request
    ops = ops_of_config(decided, accelerator=source.accelerator)
    reasons = ", ".join(f"{op} for {reason}" for op, reason in ops.items())
    nothing = f"nothing in it loads an op on {source.accelerator}, so it is the usual set"
    because = f"--for {config}: {reasons or nothing}{beyond_the_table(source)}"
    return replace(request, ops=tuple(ops) or None, ops_because=because)


def beyond_the_table(source: Source) -> str:
    """What is known to be unknown about a DeepSpeed of another version than the table of ops was written for."""
    folder = Path(source.folder)
    found = unknown_sites(find_load_sites(folder)) if source.folder and folder.is_dir() else ()
    sites = [site for site in found if source.op(site.op) is not None]
    if not sites:
        return ""
    places = ", ".join(dict.fromkeys(f"{site.op} in {site.file}" for site in sites))
    also = f"; DeepSpeed {source.version} also loads {places}, and when is not known here"
    return f"{also}: --ops names such an op, in place of --for"
