"""A run whose engine has no optimizer, to evaluate a model -> what load_checkpoint does there.

As real ranks of DeepSpeed 0.19.8 did. Its engine.py makes such an engine an optimizer for training all the same, in bf16
(``_configure_bf16_optimizer``) and with ZeRO (``_configure_zero_optimizer``).
"""

from dataclasses import replace

from dsdoctor.checkpoint.contents import Facts
from dsdoctor.checkpoint.examine import PARTITIONED
from dsdoctor.checkpoint.outcome import outcome
from dsdoctor.checkpoint.plan import ALL, MODULE, NO_OPTIMIZER, Outcome, Plan, Run, Verdict, planned
from dsdoctor.checkpoint.weights_alone import outcome_of_weights

AT_STAGE_0 = 'give the engine that evaluates a configuration with "zero_optimization": {"stage": 0}'
NO_SCHEDULE = "TypeError: 'NoneType' object is not subscriptable, where it has one"
WITHOUT_ARGUMENT = "load with load_checkpoint(..., load_module_only=True)"


def outcome_of_load(facts: Facts, plan: Plan) -> Outcome:
    """What load_checkpoint does in the planned run, as it is called and with the engine that calls it."""
    if evaluates(facts, plan):
        return _outcome_of_evaluation(facts, plan)
    if not facts.trained:
        return _without_states(facts, plan)
    return outcome(facts, plan) if plan.load == ALL else outcome_of_weights(facts, plan)


def evaluates(facts: Facts, plan: Plan) -> bool:
    """Whether the run's engine has no optimizer: as it was saved, where the plan does not say it."""
    return not facts.trained if plan.evaluation is None else plan.evaluation


def _outcome_of_evaluation(facts: Facts, plan: Plan) -> Outcome:
    run = planned(facts, plan)
    if run is None or facts.stage is None:
        return Outcome(verdict=Verdict.UNKNOWN, why="no file says at which ZeRO stage it was saved")
    if run.stage:
        return _with_zero(facts, plan, run)
    found = outcome_of_weights(facts, replace(plan, load=MODULE if plan.load == ALL else plan.load))
    if found.verdict is not Verdict.LOADS or run.dtype != "bf16" or plan.load != ALL:
        return found
    return Outcome(
        verdict=Verdict.CANNOT,
        why="in bf16 DeepSpeed gives an engine without an optimizer one all the same, which looks for states of its own",
        words="KeyError: 0" if facts.stage == 0 else "TypeError: 'NoneType' object is not subscriptable",
        fix=WITHOUT_ARGUMENT,
    )


def _with_zero(facts: Facts, plan: Plan, run: Run) -> Outcome:
    words = f"AssertionError: zero stage {run.stage} requires an optimizer"
    why = f"at stage {run.stage} no engine is made without an optimizer"
    if run.stage >= PARTITIONED:
        words = "AttributeError: 'NoneType' object has no attribute 'load'"
        why = "at stage 3 an engine without an optimizer has nothing that reads checkpoints"
    alone = facts.stage is not None and facts.stage < PARTITIONED
    return Outcome(verdict=Verdict.CANNOT, why=why, words=words, fix=_fix_at_stage_0(facts, plan) if alone else "")


def _fix_at_stage_0(facts: Facts, plan: Plan) -> str:
    """What helps below stage 3: no ZeRO, and whatever the same load needs there."""
    there = _outcome_of_evaluation(facts, replace(plan, stage=0))
    return f"{AT_STAGE_0}, and {there.fix}" if there.fix else AT_STAGE_0


def _without_states(facts: Facts, plan: Plan) -> Outcome:
    """Saved by an engine without an optimizer, and to be loaded by one that has one."""
    alone = outcome_of_weights(facts, replace(plan, load=MODULE))
    if alone.verdict is not Verdict.LOADS or plan.load == MODULE:
        return alone
    if plan.load == NO_OPTIMIZER:
        why = "an engine without an optimizer saved it, and load_optimizer_states=False looks for the schedule of one"
        return Outcome(
            verdict=Verdict.UNKNOWN, why=f"{why}: it loads where the run has no scheduler", words=NO_SCHEDULE
        )
    return Outcome(
        verdict=Verdict.CANNOT,
        why="an engine without an optimizer saved it, and the run looks for the states of one",
        words="AttributeError or TypeError: 'NoneType' object ..., while it loads the optimizer",
        fix=WITHOUT_ARGUMENT,
    )
