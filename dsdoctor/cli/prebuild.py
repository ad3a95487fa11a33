"""The command that builds and installs: prebuild."""

import sys
from dataclasses import replace
from pathlib import Path

from dsdoctor.builder.install import install_built
from dsdoctor.cli.build_wheel import build_and_show
from dsdoctor.cli.options import Json, NoCache, Out
from dsdoctor.core.build_models import BuildPlan
from dsdoctor.core.requests import BuildOrder, PythonPath


def prebuild_command(
    *,
    order: BuildOrder | None = None,
    out: Out = Path("dist"),
    python: PythonPath = sys.executable,
    no_cache: NoCache = False,
    as_json: Json = False,
) -> int:
    """Build a wheel and install it. Use `install --build`, which also loads each op.

    Example: dsdoctor prebuild --for ds_config.json
    """
    order = replace(order or BuildOrder(), python=python, cache=not no_cache)

    def installed(_: BuildPlan, wheel: str) -> list[str]:
        return [f"✓ installed for {python}: {Path(wheel).name}"]

    return build_and_show(
        "prebuild", order, out, after=lambda: install_built, as_json=as_json, at_end=installed, reuse=False
    )
