"""What to change, and the search: each figure is that of the ledger with the change made."""

import itertools
from dataclasses import replace

import pytest

from dsdoctor.cli.memory import CERTAIN, DOUBTS, fits
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.memory.judge import Gpus, MemoryReport, judge
from dsdoctor.memory.models import Layout, Run, filled
from dsdoctor.memory.predict import (
    SHARE_THAT_MATTERS,
    Searched,
    Situation,
    between,
    changes,
    combine,
    in_chunks,
    overheads_of,
    room,
    search,
)
from dsdoctor.memory.text import amount, memory_lines
from tests.each import each
from tests.memory.shapes import TWO_RANKS, model_of, run_of, settings

COUNTS = [400_000, 300_000, 90_000]
GIB = 1 << 30


def situation(stage: int, *, world: int = 4, activation: int = 3_000_000, **changed: object) -> Situation:
    run = replace(run_of(COUNTS, activation=activation, logits=2_000_000), batch=4, logits=1_000_000)
    half = replace(run_of(COUNTS, activation=activation // 2, logits=1_000_000), batch=2, logits=500_000)
    again = replace(run_of(COUNTS, activation=activation // 9, logits=2_000_000), batch=4, checkpointing=True)
    model = model_of(COUNTS, runs=(run, half, again))
    return Situation(settings=settings(stage, **changed), model=model, run=run, layout=Layout(world=world))


@each(("stage", "bucket"), list(itertools.product((0, 1, 2, 3), (100_000, 500_000_000))))
def test_each_change_wins_what_its_own_ledger_says(stage: int, bucket: int) -> None:
    now = situation(stage, reduce_bucket_size=bucket)
    before = now.predicted().peak.device

    found = changes(now)

    assert all(change.won > 0 and change.won == before - change.peak for change in found)
    assert any("bucket" in change.what for change in found) == (stage > 0 and bucket > sum(COUNTS))
    costs_more_host = {change.what for change in found if "host" in change.what}
    assert all(change.host > 0 for change in found if change.what in costs_more_host)


@each("activation", [3_000_000, 3_000_000_000])
def test_what_wins_less_than_a_hundredth_is_not_advised(activation: int) -> None:
    now = situation(2, activation=activation, reduce_bucket_size=5_000_000)
    peak = now.predicted().peak.device

    found = changes(now)

    assert all(change.won >= peak / 100 for change in found)
    assert any("bucket" in change.what for change in found) == (activation == 3_000_000)
    assert any("checkpointing" in change.what for change in found)


def test_what_is_set_already_is_not_advised() -> None:
    named = {change.what for change in changes(situation(3, offload_optimizer="cpu", offload_param="cpu"))}

    assert not any("host" in name or "ZeRO stage" in name for name in named)


def test_changes_are_added_until_it_fits_and_no_further() -> None:
    now = situation(2)
    peak = now.predicted().peak.device

    assert combine(now, peak).what == ()
    some = combine(now, peak // 3)
    assert some.fits
    assert some.peak <= peak // 3
    assert not combine(now, 1000).fits
    assert len(combine(now, 1000).what) >= len(some.what)


def test_a_loss_in_pieces_leaves_everything_but_the_loss_alone() -> None:
    run = situation(0).run
    assert run is not None
    pieces = in_chunks(run)

    changed = [
        number for number, events in enumerate(zip(run.events, pieces.events, strict=True)) if len(set(events)) > 1
    ]
    assert changed
    assert all(pieces.events[number][2] < run.events[number][2] for number in changed)
    assert max(event[2] for event in pieces.events) < max(event[2] for event in run.events)


@each("limit_of", list(range(1, 30, 4)))
def test_the_batch_that_is_found_fits_and_the_next_does_not(limit_of: int) -> None:
    now = situation(2, reduce_bucket_size=1000)
    one = replace(run_of(COUNTS, activation=1_000_000), batch=1)
    two = replace(run_of(COUNTS, activation=2_000_000), batch=2)

    def peak(batch: int) -> int:
        return replace(now, run=between(one, two, batch)).predicted().peak.device

    limit = peak(limit_of) + 100
    found = search(now, one, two, limit)

    assert found.batch == limit_of
    assert found.batch_peak <= limit < peak(found.batch + 1)
    assert search(now, one, two, 1000).batch == 0


def test_the_fewest_ranks_are_found() -> None:
    now = situation(3, reduce_bucket_size=1000, activation=0)
    one = replace(run_of(COUNTS, activation=0), batch=1)
    two = replace(run_of(COUNTS, activation=0), batch=2)
    now = replace(now, run=one)
    peaks = {ranks: replace(now, layout=Layout(world=ranks)).predicted().peak.device for ranks in (4, 5)}

    assert search(now, one, two, peaks[5]).ranks == 5
    assert search(now, one, two, peaks[4]).ranks == 4
    assert search(now, one, two, 10).ranks is None


@each("on_node", [1, 2, 4, 8])
def test_gpus_beyond_a_node_are_counted_in_whole_ones(on_node: int) -> None:
    now = situation(3, reduce_bucket_size=1000, activation=0)
    one, two = (replace(run_of(COUNTS, activation=0), batch=batch) for batch in (1, 2))
    now = replace(now, run=one)

    for wanted in range(1, 10):
        limit = replace(now, layout=Layout(world=wanted)).predicted().peak.device
        ranks = search(now, one, two, limit, on_node=on_node).ranks
        assert ranks is not None
        assert wanted <= ranks < wanted + on_node
        assert ranks % on_node == 0 or ranks == wanted < on_node


def test_both_bounds_are_told_and_so_is_a_nodes_host() -> None:
    now = situation(2, reduce_bucket_size=1000, offload_optimizer="cpu", world=16)
    prediction = now.predicted()
    found = [Searched(batch=batch, batch_peak=1, ranks=ranks, ranks_peak=1) for batch, ranks in ((9, 8), (6, 16))]
    overheads = overheads_of(prediction.peak.device, world=16)
    done = replace(
        examined(now, ()), overheads=overheads, searched=found[0], searched_safe=found[1], on_node=8, host_loading=GIB
    )

    text = "\n".join(memory_lines(done))

    host = 8 * max(moment.host for moment in prediction.moments)
    assert f"the 8 ranks of a node keep {amount(host)} of host memory together" in text
    assert "8.0 GiB on a node" in text
    assert "fits 16 GPUs: 9 (tensors 1 bytes); 6 to be safe" in text
    assert "for a micro batch of 4: 8 (tensors 1 bytes); 16 to be safe" in text
    least, most = (
        prediction.peak.device + sum(bounds) for bounds in zip(*((o.low, o.high) for o in overheads), strict=True)
    )
    assert f"on each GPU: {amount(least)} at least, {amount(most)} to be safe" in text


def test_a_change_that_saves_little_is_not_the_first() -> None:
    """A bucket of 2 % of the peak is cheap to make smaller, and helps nobody."""
    now = situation(3, reduce_bucket_size=500_000_000, activation=20 * GIB)
    peak = now.predicted().peak.device
    won = [change.won / peak for change in changes(now)]

    assert won == sorted(won, key=lambda share: share < SHARE_THAT_MATTERS)
    assert won[0] >= SHARE_THAT_MATTERS > min(won)


def test_runs_that_differ_are_no_line() -> None:
    one = replace(run_of([1, 2]), batch=1)
    with pytest.raises(ValueError, match="do not run alike"):
        between(one, replace(run_of([1, 2, 3]), batch=2), 3)


@each(
    ("memory", "rules"),
    [
        (1 << 20, {"memory-does-not-fit"}),
        (1 << 30, {"memory-fits-barely"}),
        (80 << 30, set()),
    ],
)
def test_a_gpu_is_too_small_or_barely_large_enough_or_fine(memory: int, rules: set[str]) -> None:
    now = situation(2, reduce_bucket_size=1000)
    told = now.predicted()
    beside = overheads_of(told.peak.device, world=4)
    limit = room(memory, world=4)
    together = combine(now, limit) if told.peak.device > limit else None

    found = tuple(judge(now, told, Gpus(count=4, memory=memory), beside, together))

    assert {finding.rule for finding in found} == rules
    assert {finding.severity for finding in found} <= {Severity.ERROR, Severity.WARNING}


JUDGED = [
    ({"reduce_bucket_size": 500_000_000}, "reduce-bucket-exceeds-model"),
    ({"offload_optimizer": "nvme"}, "memory-part-not-followed"),
    ({"quantized_weights": True}, "memory-part-not-followed"),
    ({"optimizer": None}, "memory-part-not-followed"),
    ({"hpz_partition_size": 8}, "memory-part-not-followed"),
    ({"automatic": ("zero_optimization.reduce_bucket_size",)}, "configuration-left-auto"),
]


@each(("changed", "rule"), JUDGED)
@each("stage", [1, 2, 3])
def test_what_is_not_told_or_is_waste_is_said(changed: dict[str, object], rule: str, stage: int) -> None:
    plain = {"reduce_bucket_size": 1000}
    now, sound = situation(stage, **{**plain, **changed}), situation(stage, **plain)

    def rules(each: Situation) -> set[str]:
        return {finding.rule for finding in judge(each, each.predicted(), None, (), None)}

    assert rules(now) == {rule}
    assert rules(sound) == set()


def test_a_model_that_could_not_be_followed_is_said_and_is_never_called_fitting() -> None:
    broken = Run(batch=1, sequence=8, checkpointing=False, error="DynamicOutputShapeException: aten.nonzero")
    now = Situation(settings=settings(2, reduce_bucket_size=9), model=model_of(COUNTS), run=broken, layout=TWO_RANKS)

    found = list(judge(now, now.predicted(), Gpus(count=2, memory=GIB << 10), (), None))

    assert [finding.rule for finding in found] == ["activations-not-told"]
    assert "nonzero" in found[0].evidence[0]


@each(("memory", "rules"), [(1 << 20, {"memory-does-not-fit"}), (30 * GIB, {"memory-fits-barely"}), (GIB << 10, set())])
def test_where_a_kernel_decides_only_what_the_least_takes_is_an_error(memory: int, rules: set[str]) -> None:
    most = run_of(COUNTS, activation=8 * GIB)
    now = situation(2, reduce_bucket_size=1000)
    upper = replace(now, run=most).predicted()
    found = tuple(judge(now, now.predicted(), Gpus(count=4, memory=memory), (), None, upper=upper))

    assert {finding.rule for finding in found} == rules | {"attention-kernel-decides"}


@each(("table", "severity"), [(True, Severity.ERROR), (False, Severity.NOTE)])
def test_a_sequence_beyond_the_positions_is_told(table: bool, severity: Severity) -> None:
    now = situation(2, reduce_bucket_size=1000)
    short = replace(now, model=replace(now.model, positions=7, position_table=table))
    pixels = replace(short, run=replace(short.run, tokens=False))  # type: ignore[type-var]

    def found(each: Situation) -> list[tuple[str, Severity]]:
        return [(finding.rule, finding.severity) for finding in judge(each, each.predicted(), None, (), None)]

    assert found(short) == [("sequence-exceeds-positions", severity)]
    assert found(replace(now, model=replace(now.model, positions=8))) == found(pixels) == []


@each("rule", sorted(DOUBTS | CERTAIN))
def test_no_tick_stands_beside_what_is_missing(rule: str) -> None:
    now = situation(2, reduce_bucket_size=1000)
    missing = Finding.note(rule, "something is missing", fix="measure it")
    done = examined(now, (missing,))

    assert not any("✓" in line for line in fits(done, "4x80G"))
    assert [line[0] for line in fits(examined(now, ()), "4x80G")] == ["✓"]


def examined(now: Situation, findings: tuple[Finding, ...]) -> MemoryReport:
    return MemoryReport(
        now=now,
        prediction=now.predicted(),
        upper=None,
        overheads=(),
        changes=(),
        combined=None,
        searched=None,
        searched_upper=None,
        searched_safe=None,
        on_node=1,
        host_loading=0,
        findings=findings,
    )


def test_the_host_of_a_node_is_counted_for_all_its_ranks() -> None:
    now = situation(2, reduce_bucket_size=1000, offload_optimizer="cpu", world=8)
    told = now.predicted()
    one = max(moment.host for moment in told.moments)

    def rules(host: int) -> set[str]:
        gpus = Gpus(count=8, memory=GIB << 10, host=host, on_node=4)
        return {finding.rule for finding in judge(now, told, gpus, (), None)}

    assert rules(4 * one) == set()
    assert rules(4 * one - 1) == {"host-memory-does-not-fit"}


def test_the_trainers_buckets_take_the_place_of_auto_alone() -> None:
    keys = ("zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size")
    given = settings(3, automatic=keys, param_persistence_threshold=7)

    done = filled(given, 100)

    assert (done.reduce_bucket_size, done.prefetch_bucket_size, done.param_persistence_threshold) == (10_000, 9_000, 7)
    assert filled(given, None) == given
