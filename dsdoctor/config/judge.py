"""All checks of a configuration, in the order in which their findings are told."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsdoctor.config import autos, batch, huggingface, keys, machine, optimizers, values, zero
from dsdoctor.config.answer import Asked
from dsdoctor.config.question import Correction, Question, Verdict
from dsdoctor.config.read import ReadConfig
from dsdoctor.core.finding import Finding, Severity

Check = Callable[[Question], Iterator[Verdict]]

CHECKS: tuple[Check, ...] = (
    huggingface.plain_json,
    keys.removed_keys,
    keys.refused_keys,
    keys.unread_keys,
    values.refused_values,
    values.values_of_another_kind,
    batch.batch_sizes,
    huggingface.mismatches,
    huggingface.refusals,
    huggingface.accelerate_file,
    autos.autos_for_nobody,
    autos.autos_for_others,
    optimizers.optimizer,
    optimizers.scheduler,
    optimizers.scheduler_by_metric,
    zero.offload_at_the_wrong_stage,
    zero.offload_keys_without_effect,
    zero.nvme_path,
    machine.precision_of_gpus,
    zero.keys_ignored_by_stage,
    zero.large_buckets,
    keys.deprecated_keys,
    optimizers.own_optimizer_with_offload,
    batch.batch_size_for_one_world,
    machine.ops_not_built,
    huggingface.not_filled,
    huggingface.not_asked,
)

ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


@dataclass(frozen=True, kw_only=True)
class ConfigJudged:
    """The verdicts, what was read, who answered, and each "auto" with its value as lines."""

    read: ReadConfig
    asked: Asked
    verdicts: tuple[Verdict, ...]
    filled: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings alone."""
        return tuple(verdict.finding for verdict in self.verdicts)


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """A configuration before and after its corrections. ``in_place``: nothing else in the text was changed."""

    before: ConfigJudged
    after: ConfigJudged
    corrections: tuple[Correction, ...]
    in_place: bool


def judge(question: Question) -> tuple[Verdict, ...]:
    """Every verdict once, errors first."""
    found = dict.fromkeys(verdict for check in CHECKS for verdict in check(question))
    return tuple(sorted(found, key=lambda verdict: ORDER.index(verdict.finding.severity)))


def corrections_of(verdicts: tuple[Verdict, ...]) -> Iterator[Correction]:
    """The corrections that there are, in order, each once."""
    yield from dict.fromkeys(verdict.correction for verdict in verdicts if verdict.correction is not None)
