"""What needs several lines of a run: who holds the GPU, what a data set, a kernel or an optimizer under ZeRO itself said."""

import itertools

from dsdoctor.core.finding import Finding
from tests.diagnosis.reading import diagnose
from tests.each import each

SITE = "/v/lib/python3.11/site-packages"


def first(log: list[str]) -> Finding:
    return diagnose(log).findings[0]


def full(free: float, loose: float, own: float, others: tuple[float, ...]) -> str:
    held = "".join(f" Process {4711 + number} has {size:.2f} GiB memory in use." for number, size in enumerate(others))
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 954.00 MiB. GPU 2 has a total capacity of 79.25 GiB of "
        f"which {free:.2f} GiB is free.{held} Including non-PyTorch memory, this process has {own:.2f} GiB memory in use. Of the "
        f"allocated memory 30.00 GiB is allocated by PyTorch, and {loose:.2f} GiB is reserved by PyTorch but unallocated."
    )


FIGURES = [
    *itertools.product((0.1, 0.4), (0.05, 1.2, 11.0, 30.0), ((), (0.4,), (12.0,), (44.7,), (30.0, 20.0), (0.3, 0.3)))
]


@each(("free", "loose", "others"), FIGURES)
def test_a_gpu_that_others_fill_is_not_fragmented(free: float, loose: float, others: tuple[float, ...]) -> None:
    finding = first([full(free, loose, 78.0 - sum(others), others)])
    dwarfed = sum(others) > max(free + loose, 0.25 * 79.25)

    assert finding.rule == "gpu-oom"
    assert (f"{sum(others):.2f} GiB of it" in finding.title) is dwarfed
    assert all(str(4711 + number) in finding.title for number in range(len(others))) or not dwarfed
    assert not ("fragmented" in finding.title and dwarfed)


def test_a_process_in_a_container_is_not_taken_for_another_one() -> None:
    message = full(0.1, 0.05, 34.0, (78.0,)).replace(
        "Including non-PyTorch memory, this process has 34.00 GiB memory in use. ", ""
    )

    assert "another process" not in first([message]).title


def unnamed(torch: float, sizes: tuple[float, ...], *, total: float = 23.65, old: bool = False) -> str:
    """The message of a process in a container, which does not know its own number; ``old``: as torch 2.0 and 2.1 wrote it."""
    held = "".join(f" Process {4711 + number} has {size:.2f} GiB memory in use." for number, size in enumerate(sizes))
    return (
        f"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 2 has a total "
        f"{'capacty' if old else 'capacity'} of {total} GiB of which 93.81 MiB is free.{held} Of the allocated memory "
        f"{torch:.2f} GiB is allocated by PyTorch, and 2.30 MiB is reserved by PyTorch but unallocated."
    )


def test_of_processes_without_a_name_torchs_own_figures_tell_which_is_another() -> None:
    for old, (own, other) in itertools.product((True, False), ((1.57, 21.9), (8.0, 15.5), (3.0, 20.5))):
        for sizes in ((own, other), (other, own)):
            finding = first([unnamed(own - 0.4, sizes, old=old)])
            assert f"another process holds {other:.2f} GiB of it (process {4711 + sizes.index(other)};" in finding.title
            assert finding.fix and "nvidia-smi" in finding.fix.steps[0].line
            assert "halve" not in finding.fix.text
    small = first([unnamed(21.5, (0.4, 22.9))])
    assert "process" not in small.title


def test_where_two_processes_may_be_this_one_it_is_said_to_be_one_of_them() -> None:
    finding = first([unnamed(10.9, (11.4, 11.6))])

    assert "processes 4711, 4712 hold 23.00 GiB of it together, including this one" in finding.title
    assert finding.fix and "torch.cuda.set_device(LOCAL_RANK)" in finding.fix.text


BY_WORKER = {
    "PIL.UnidentifiedImageError": "cannot identify image file '/data/gqa/23.jpg'",
    "KeyError": "'labels'",
    "mydata.BrokenShard": "shard 17 is not readable",
    "ValueError": "sample 4711 has no target",
    "av.error.InvalidDataError": "moov atom not found",
}


@each(("error", "label"), [*itertools.product(BY_WORKER, ("", "[rank3]: ", "[default3]:"))])
def test_what_the_data_set_raised_is_told_and_not_the_place_that_passes_it_on(error: str, label: str) -> None:
    name = error.rpartition(".")[2]
    log = [
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 201, in <module>',
        "    trainer.train()",
        f'  File "{SITE}/torch/_utils.py", line 750, in reraise',
        "    raise exception",
        f"{error}: Caught {name} in DataLoader worker process 2.",
        "Original Traceback (most recent call last):",
        f'  File "{SITE}/torch/utils/data/_utils/worker.py", line 349, in _worker_loop',
        "    data = fetcher.fetch(index)",
        '  File "/w/data/collate.py", line 58, in __call__',
        "    rows = [read(x) for x in feats]",
        f"{error}: {BY_WORKER[error]}",
    ]
    finding = first([label + line for line in log])

    assert finding.rule == "data-worker-failed"
    assert name in finding.title and BY_WORKER[error] in finding.title and "/w/data/collate.py:58" in finding.title
    assert "itself stopped" not in finding.title


@each("source", ["raise self._exception", "raise exception", "raise err from None"])
def test_a_place_that_passes_an_exception_on_has_refused_nothing(source: str) -> None:
    log = [
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 201, in <module>',
        "    rows = pool.read()",
        f'  File "{SITE}/pool/read.py", line 9, in result',
        f"    {source}",
        "mydata.BrokenShard: shard 17",
    ]

    assert "itself stopped" not in first(log).title


KERNEL = (
    "../aten/src/ATen/native/cuda/{file}.cu:110: kernel: block: [0,0,0], thread: [0,0,0] Assertion `{words}` failed."
)
ASSERTED = ["RuntimeError: CUDA error: device-side assert triggered"]


@each("loss", ["", "'loss/policy_avg': nan", "'loss': nan", "lm_loss = nan"])
def test_a_kernel_that_cannot_draw_from_nan_blames_no_index(loss: str) -> None:
    words = KERNEL.format(file="TensorCompare", words="probability tensor contains either `inf`, `nan` or element < 0")
    before = [f"{{{loss}, 'lr': 3e-06}}"] if loss else []
    finding = first([*before, words, *ASSERTED])

    assert finding.rule == "sampling-from-nan"
    assert "index" not in finding.title
    assert (
        (loss.split("'")[1 if "'" in loss else 0].split(" ")[0] in finding.title)
        if loss
        else ("had become" not in finding.title)
    )


def test_a_kernel_is_quoted_where_no_rule_knows_its_words() -> None:
    log = [KERNEL.format(file="Loss", words="tile >= zero && tile <= one"), *ASSERTED]

    assert "tile >= zero && tile <= one" in first(log).title
    assert "index" in first(ASSERTED).title


@each("zero", ["zero/stage_1_and_2.py", "zero/stage3.py", "bf16_optimizer.py", ""])
def test_an_optimizer_that_misses_its_state_is_told_of_zero_where_zero_steps_it(zero: str) -> None:
    stepped = (
        [f'  File "{SITE}/deepspeed/runtime/{zero}", line 1916, in step', "    self.optimizer.step()"] if zero else []
    )
    log = [
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 7, in <module>',
        "    engine.step()",
        *stepped,
        '  File "/w/muon.py", line 151, in step',
        '    params = [p for p in group["params"] if self.state[p]["use_muon"]]',
        "KeyError: 'use_muon'",
    ]
    finding = first(log)

    assert finding.rule == "optimizer-state-key"
    assert ("flat partitions" in finding.title) is bool(zero)
    assert "use_muon" in finding.title


@each("call", ["model.save_checkpoint(out)", "torch.save(state, path)", "model.save_pretrained(out)", "build(op)"])
def test_a_full_disk_is_told_with_the_checkpoint_that_is_not_whole(call: str) -> None:
    failed = "OSError: [Errno 28] No space left on device: 'out/step10'"
    finding = first(["Traceback (most recent call last):", '  File "/w/t.py", line 7, in main', f"    {call}", failed])

    assert finding.rule == "disk-full"
    assert ("is incomplete" in finding.title) is ("save" in call)


def test_a_key_that_is_no_state_of_an_optimizer_is_none() -> None:
    assert (
        first(
            ["Traceback (most recent call last):", '  File "/w/t.py", line 7, in f', "    x['a']", "KeyError: 'a'"]
        ).rule
        == "key-missing"
    )


@each(("name", "rule"), [("train", "known-regression"), ("eval", "placeholder-in-use"), ("step", "placeholder-in-use")])
def test_a_placeholder_that_the_trainer_calls_is_a_matter_of_versions(name: str, rule: str) -> None:
    assert first([f"AttributeError: 'DummyOptim' object has no attribute '{name}'"]).rule == rule
