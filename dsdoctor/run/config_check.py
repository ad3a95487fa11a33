"""Before `deepspeed.initialize`: is there something in its configuration that DeepSpeed would ignore or misread without a word?

Runs inside the training's process, where DeepSpeed is loaded already: it is asked here, which takes a second and changes nothing of
it. Only errors and silent surprises are said, each once.
"""

import contextlib
import inspect
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dsdoctor.config.answer import Asked, ConfigContext, Effective, Refusal
from dsdoctor.config.document import read
from dsdoctor.config.judge import judge
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import CHILD_SCRIPTS
from dsdoctor.ui.terminal import finding_lines, printable

QUIET = {"config-key-deprecated", "config-not-judged", "config-batch-sizes-clash", "config-batch-missing"}
"""What DeepSpeed says itself in the next moment, with ranks and process groups that are not known here yet."""


class Say(Protocol):
    """How `dsdoctor.run` speaks."""

    def __call__(self, *lines: str) -> None:
        """Say these lines."""


class ConfigCheck:
    """Judges the configuration of each engine; ``said`` is what was told of earlier ones."""

    def __init__(self, mode: str, *, speaks: bool, say: Say) -> None:
        """``speaks``: only one rank of a launch does."""
        self.mode, self.speaks, self.say = mode, speaks, say
        self.said: set[Finding] = set()
        self.deepspeed: DeepSpeedHere | None = None

    def before(self, initialize: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Judge what a call of ``initialize`` is given. Raises UsageError in strict mode; nothing else ends a training."""
        # in strict mode every rank refuses, or the others would wait for the one that did
        if not self.speaks and self.mode != "strict":
            return
        try:
            findings = self.judged(config_of(initialize, args, kwargs))
        except UsageError:  # it cannot be read: DeepSpeed says so itself in the next moment
            return
        except Exception as error:  # an error of dsdoctor's own must not end a training
            if self.speaks:
                self.say(f"! the configuration could not be checked: {type(error).__name__}: {error}")
            return
        if self.speaks:
            self.tell(findings)
        if self.mode == "strict" and any(finding.severity is Severity.ERROR for finding in findings):
            hint = "fix the configuration, or remove --config-check strict"
            raise UsageError("the DeepSpeed configuration has errors (--config-check strict)", hint=hint)

    def judged(self, config: dict[str, Any] | None) -> tuple[Finding, ...]:
        """The findings about a configuration; none where there is none."""
        if config is None:
            return ()
        self.deepspeed = self.deepspeed or DeepSpeedHere()
        found = [
            verdict.finding
            for verdict in judge(ConfigContext(config=config, asked=self.deepspeed.ask(config), in_training=True))
        ]
        return tuple(each for each in found if each.severity is not Severity.NOTE and each.rule not in QUIET)

    def tell(self, findings: Sequence[Finding]) -> None:
        """Say what was not said yet."""
        new = [finding for finding in findings if finding not in self.said]
        self.said.update(new)
        if new:
            self.say("about the DeepSpeed configuration:", *map(printable, finding_lines(new)))


def config_of(initialize: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration that a call names: an argument, or --deepspeed_config among the script's own."""
    given = inspect.signature(initialize).bind(*args, **kwargs).arguments
    of_script = getattr(given.get("args"), "deepspeed_config", None)
    config = next(
        (each for each in (given.get("config"), given.get("config_params"), of_script) if each is not None), None
    )
    if isinstance(config, str | Path):
        return read(str(config)).config
    return config if isinstance(config, dict) else None


class DeepSpeedHere:
    """The DeepSpeed of this process. Its optimizer and scheduler are not asked for: it makes them in the next moment."""

    def __init__(self) -> None:
        # the scripts are made for other interpreters, and this is one that DeepSpeed is loaded in
        self.keys = runpy.run_path(str(CHILD_SCRIPTS / "config_keys.py"))
        self.facts = runpy.run_path(str(CHILD_SCRIPTS / "config_facts.py"))
        stages = runpy.run_path(str(CHILD_SCRIPTS / "config_stages.py"))
        with quiet_deepspeed() as deepspeed:
            sections, self.by_model = self.keys["sections"]()
            known = {
                "version": deepspeed.__version__,
                "sections": sections,
                "removed": self.keys["removed"](sections),
                "stages": stages["of_fields"](str(Path(deepspeed.__file__).parent), self.by_model),
            }
        self.known = msgspec.convert(known, Asked)

    def ask(self, config: dict[str, Any]) -> Asked:
        """What it answers about a configuration."""
        with quiet_deepspeed():
            made, refusals = self.keys["judge"](config, self.by_model)
            facts = self.facts["of"](made) if made is not None else None
        told = msgspec.convert(refusals, tuple[Refusal, ...])
        return replace(self.known, config=config, refusals=told, facts=msgspec.convert(facts, Effective | None))


@contextlib.contextmanager
def quiet_deepspeed() -> Iterator[Any]:
    """DeepSpeed, which logs each configuration that it looks at, without its log."""
    import deepspeed

    logger = deepspeed.utils.logger
    before, logger.disabled = logger.disabled, True
    try:
        yield deepspeed
    finally:
        logger.disabled = before
