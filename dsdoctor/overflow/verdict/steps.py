"""Verdicts on how DeepSpeed treats a step, beside the cause of an overflow: reports of all ranks -> a Finding.

Pure; knows no torch.
"""

from collections.abc import Iterator

from dsdoctor.core.finding import Finding
from dsdoctor.overflow.verdict.advice import RankReports
from dsdoctor.overflow.verdict.evidence import rule_of
from dsdoctor.overflow.verdict.gradients import NORMAL_SKIPS


def bad_step_applied(rank_reports: RankReports) -> Iterator[Finding]:
    """The gradients are not finite and nothing in DeepSpeed stops the step.

    ZeRO stage 0 in float32 has no check at all, and bf16 has none with check_grad_overflow set to false.

    Why it matters: the weights become nan, and only a checkpoint from before the step helps then.

    How to fix it: use ZeRO stage 1, which checks, or stop before the weights are written:

        $ python -m dsdoctor.run --on-overflow raise train.py

    Since: 0.1
    """
    if any(rank_report.applied for rank_report in rank_reports):
        first = rank_reports[0]
        yield Finding.error(
            rule_of(bad_step_applied),
            f"DeepSpeed applies step {first.step} although its gradients are not finite: the weights become nan",
            evidence=(f"ZeRO stage {first.zero_stage}, {first.dtype}: no overflow check",),
            fix="Stop before the weights are written with --on-overflow raise, or use ZeRO stage 1, which checks.",
        )


def loss_not_scaled(rank_reports: RankReports) -> Iterator[Finding]:
    """The step divides the gradients by the loss scale, and the loss was never multiplied by it.

    DeepSpeed 0.19.8 scales the loss in engine.backward only for ZeRO stages 1 to 3.

    Why it matters: in stage 0 with fp16 the gradients underflow, and every update is too small by the loss scale. Adam hides
    most of it, and DeepSpeed reports nothing.

    How to fix it: use ZeRO stage 1, or bf16; or scale the loss yourself with engine.optimizer.loss_scale.

    Since: 0.1
    """
    for rank_report in rank_reports:
        seen, due = rank_report.loss_gradient, rank_report.loss_gradient_due
        if seen is not None and due is not None and due > 1 and abs(seen) < due / 2:
            place = f"step {rank_report.step}, rank {rank_report.rank}"
            yield Finding.warning(
                rule_of(loss_not_scaled),
                f"the loss is not scaled: its gradient is {seen:g}, and the step divides as if it were {due:g}",
                evidence=(f"ZeRO stage {rank_report.zero_stage}, {rank_report.dtype}, {place}",),
                fix="Use ZeRO stage 1, or bf16; or scale the loss yourself with engine.optimizer.loss_scale.",
            )
            return


def checkpoint_not_loaded(rank_reports: RankReports) -> Iterator[Finding]:
    """engine.load_checkpoint found no checkpoint in its folder, returned (None, None), and raised nothing.

    The folder is not there, is empty, has no file called latest, or holds another tag than the one asked for.

    Why it matters: the training begins anew from the weights of the script, and looks like one that goes on.

    How to fix it: look at the folder that the finding names; give the tag of a checkpoint in it, or write that tag into its
    file called latest. If the run is meant to begin anew, nothing is to be done.

    Since: 0.1
    """
    folder = next((rank_report.not_loaded for rank_report in rank_reports if rank_report.not_loaded), "")
    if folder:
        yield Finding.warning(
            rule_of(checkpoint_not_loaded),
            f"load_checkpoint loaded nothing from {folder}: the training begins anew",
            evidence=(f"step {rank_reports[0].step}: it returned (None, None)",),
            fix="Give the tag of a checkpoint in that folder, or write it into the file called latest there.",
        )


def steps_skipped_in_a_row(rank_reports: RankReports) -> Iterator[Finding]:
    """Step after step is skipped, so no weight changes any more.

    A dynamic loss scale may need some thirty steps to come down from its start; more steps than that are no search.
    Without a loss scale (bfloat16, float32) each skipped step has a cause of its own.

    Why it matters: the training looks alive and learns nothing.

    How to fix it: stop the run, and fix the cause that is reported beside this finding.

    Since: 0.1
    """
    most = max((rank_report.skipped for rank_report in rank_reports), default=0)
    if most > (NORMAL_SKIPS if rank_reports[0].dtype == "float16" else 2):
        last = rank_reports[0].step - most
        yield Finding.error(
            rule_of(steps_skipped_in_a_row),
            f"{most} steps in a row were skipped: no weight has changed {f'since step {last}' if last >= 0 else 'yet'}",
            fix="Stop the run: it does not learn.",
        )
