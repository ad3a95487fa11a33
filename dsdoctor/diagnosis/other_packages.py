"""A hit in the build of another package than DeepSpeed -> the same hit in words, and with a fix, of that package."""

import re
from dataclasses import replace

from dsdoctor.core.finding import Step, step
from dsdoctor.diagnosis.catalogue.rules import RULES
from dsdoctor.diagnosis.models import Facts, Hit, Stage

A_BUILD = {Stage.INSTALL, Stage.COMPILE, Stage.LINK}
DEEPSPEEDS_OWN = re.compile(
    r"\b(?:deepspeed|DeepSpeed|op_builder|pre-compil|DS_[A-Z]{2,}|ds_accelerator|Install Ops|fused_adam is)"
)
"""Words that only DeepSpeed's own setup and ops print."""

BUILDS_DEEPSPEED = re.compile(
    r"python -m dsdoctor (?:prebuild|build-wheel|plan)|pip install .{0,80}\bdeepspeed\b|DS_BUILD_"
)
PIPS_OWN = "pip-other-wheel-failed"
WITHOUT_ISOLATION = step("python -m pip install --no-build-isolation {project}")
ONE_COMPILER = step("MAX_JOBS=1 python -m pip install --no-build-isolation {project}")
ITS_STEPS = {
    "apex": (
        step(
            "python -m pip install -v --no-build-isolation git+https://github.com/NVIDIA/apex",
            note="apex of PyPI is another package",
        ),
    ),
    "transformer-engine": (step("python -m pip install --no-build-isolation 'transformer-engine[pytorch]'"),),
}
ITS_TITLES = {
    "torch-missing-at-build": "the build of {project} cannot import torch: it is not installed, or pip's build isolation hides it",
    "deepspeed-setup-bug": "the setup of {project} fails: {error}",
}
ITS_FIXES = {
    "torch-missing-at-build": "install torch first, then {project} without isolation, by a command of its own: in one command "
    "with torch (or one file of requirements) pip builds it before torch is installed. It needs ninja, packaging and wheel too",
    "deepspeed-setup-bug": "take another release of {project}, or a wheel of it that is compiled already",
}
TORCH_FIRST = step("python -m pip install torch ninja packaging wheel setuptools")


def of_its_package(hit: Hit, facts: Facts) -> Hit:
    """The hit, about the package that was being built; as it is where that is DeepSpeed, or not known."""
    project = hit.project if hit.project is not None else facts.project
    if not project or project == "deepspeed" or hit.rule.stage not in A_BUILD or DEEPSPEEDS_OWN.search(hit.text):
        return hit
    signature = hit.signature
    title = ITS_TITLES.get(hit.rule.id, signature.title or hit.rule.title).replace("DeepSpeed's setup.py", "{project}")
    fix = ITS_FIXES.get(hit.rule.id, signature.fix or hit.rule.fix)
    fix = re.sub(r";? ?(?:and )?dsdoctor (?:does|builds|knows)[^;.]*", "", fix)
    fix = fix.replace("runs or builds DeepSpeed", "builds {project}").replace("safe for DeepSpeed", "safe")
    steps = _its_steps(signature.steps or hit.rule.steps, project, hit.rule.id)
    groups = {**hit.groups, "project": project}
    rule = RULES[PIPS_OWN] if hit.rule.id == "deepspeed-setup-bug" else hit.rule
    return replace(
        hit, rule=rule, signature=replace(signature, title=title, fix=fix, steps=steps), groups=groups, op=None
    )


def _its_steps(steps: tuple[Step, ...], project: str, rule: str) -> tuple[Step, ...]:
    """The steps, with those that build DeepSpeed replaced by the one that builds this package."""
    kept = [one for one in steps if not BUILDS_DEEPSPEED.search(one.template)]
    if len(kept) == len(steps):
        return steps
    own = (ONE_COMPILER,) if rule == "compiler-oom-killed" else ITS_STEPS.get(project, (WITHOUT_ISOLATION,))
    return (*((TORCH_FIRST,) if rule == "torch-missing-at-build" else ()), *kept, *own)
