"""Logs of runs that hang, made of templates: which rank is missing is read from figures, reports and the ranks' own lines."""

from itertools import product

from dsdoctor.diagnosis.waiting import rank_behind, rank_that_fell_silent
from tests.diagnosis.reading import diagnose
from tests.each import each

WORLDS = (3, 4, 8)
FORMS = (
    "[rank{rank}]:[E419 10:42:28.86 ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 9 Rank {rank}] Exception (either an error or "
    "timeout) detected by watchdog at work: 86, last enqueued NCCL work: {begun}, last completed NCCL work: 85.",
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank {rank}] Timeout at NCCL work: 86, last enqueued NCCL work: {begun}, "
    "last completed NCCL work: 85.",
    "[rank{rank}]:[E205 18:11:06.3 ProcessGroupNCCL.cpp:1682] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump signal "
    "due to a collective timeout from  rank 1 and we will try our best to dump the debug info. Last enqueued NCCL work: {begun}, "
    "last completed NCCL work: 85.",
)
TIMEOUT = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=86, "
    "OpType={operation}, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600069 milliseconds before timing out."
)


def waiting(world: int, *, without: int | None = None, operation: str = "ALLREDUCE") -> list[str]:
    return [TIMEOUT.format(rank=rank, operation=operation) for rank in range(world) if rank != without]


@each(("world", "form"), list(product(WORLDS, FORMS)))
def test_the_rank_with_the_fewest_works_is_named_wherever_it_is(world: int, form: str) -> None:
    for behind in range(world):
        figures = [form.format(rank=rank, begun=80 if rank == behind else 89) for rank in range(world)]

        title = diagnose([*waiting(world), *figures]).findings[0].title

        assert f"rank {behind} is behind: it last started work 80" in title and "89" in title, title


@each("form", FORMS)
def test_nobody_is_named_where_all_have_begun_the_same(form: str) -> None:
    figures = [form.format(rank=rank, begun=89) for rank in range(4)]

    assert "behind" not in diagnose([*waiting(4), *figures]).findings[0].title


def test_figures_of_two_groups_are_not_compared() -> None:
    one, other = (
        "[PG ID 1 PG GUID 1 Rank 0] Timeout at NCCL work: 3, last enqueued NCCL work: 3, last completed NCCL work: 2",
        "[PG ID 2 PG GUID 2 Rank 1] Timeout at NCCL work: 9, last enqueued NCCL work: 9, last completed NCCL work: 8",
    )

    assert rank_behind([one, other, other.replace("Rank 1", "Rank 2")]) == ""


@each(
    ("report", "words"),
    [
        (
            "\t - To our best knowledge, ranks [3] are the lagging ranks that caused this timeout. They never joined any",
            "torch names rank 3",
        ),
        (
            "\t   - [2, 3] finished collective #17, but didn't join collective #18 (count from 1)",
            "ranks 2, 3 finished collective 17",
        ),
    ],
)
def test_torch_s_own_report_is_believed(report: str, words: str) -> None:
    assert words in diagnose([*waiting(4), report]).findings[0].title


def test_ranks_in_different_collectives_took_different_paths() -> None:
    log = [*waiting(4, without=2), TIMEOUT.format(rank=2, operation="ALLGATHER")]

    title = diagnose(log).findings[0].title

    assert "different paths" in title and "rank 2 in ALLGATHER" in title


@each(("world", "step"), list(product(WORLDS, ("forward", "backward", "optimizer"))))
def test_a_rank_that_stopped_printing_what_the_others_print_is_named(world: int, step: str) -> None:
    for silent in range(world):
        rounds = [f"{step} on device {rank} step {number}" for number in range(3) for rank in range(world)]
        last = [f"{step} on device {rank} step 3" for rank in range(world) if rank != silent]

        title = diagnose([*rounds, *last, *waiting(world, without=silent)]).findings[0].title

        assert f"rank {silent} never printed its next" in title, title


def test_a_line_of_rank_0_alone_says_nothing_of_the_others() -> None:
    assert rank_that_fell_silent([b"[rank0]: loss on rank 0 step %d" % step for step in range(4)]) == ""
    assert rank_that_fell_silent([b"step 1", b"step 2"]) == ""


@each(
    ("above", "words"),
    [
        ("Running tokenizer on dataset:  43%|####      | 86/200 [29:58<39:44, 4.11 examples/s]", "data preparation"),
        ("Map (num_proc=4):  71%|#######   | 71/100 [29:58<10:44, 1.1 examples/s]", "data preparation"),
        ("***** Running Evaluation *****", "evaluation or generation"),
        ('  File "/v/transformers/generation/utils.py", line 2215, in generate', "evaluation or generation"),
        ("Loading checkpoint shards:  40%|####      | 12/30 [29:10<43:45, 145.8s/it]", "model loading"),
        ('  File "/v/deepspeed/runtime/engine.py", line 4900, in save_checkpoint', "save_checkpoint"),
    ],
)
def test_what_the_ranks_did_before_they_waited_is_told(above: str, words: str) -> None:
    assert words in diagnose([above, *waiting(4, without=0)]).findings[0].title


def test_data_that_was_prepared_before_training_began_is_not_blamed() -> None:
    log = ["Map:  99%|#########9| 99/100 [00:01<00:00, 90.1 examples/s]", "{'loss': 2.1, 'step': 1}", *waiting(4)]

    assert "preparation" not in diagnose(log).findings[0].title
