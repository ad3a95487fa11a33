"""The general answers: an exception that no wording knows, by its kind and by whose code raised it."""

import pytest

from dsdoctor.core.finding import Finding
from dsdoctor.diagnosis.catalogue import Rule, Signature
from dsdoctor.diagnosis.findings import GENERAL, answer_to
from dsdoctor.diagnosis.models import Facts
from dsdoctor.diagnosis.timeline import Failure, frame_of
from tests.diagnosis.reading import diagnose
from tests.each import each

WORDINGS = [(rule, signature) for rule in GENERAL for signature in rule.signatures]
SITE = "/v/lib/python3.11/site-packages"
CLONES = {
    "TRL": "/workspace/trl/trl/trainer/sft_trainer.py",
    "verl": "/root/verl/verl/workers/fsdp_workers.py",
    "LLaMA-Factory": "/data/LLaMA-Factory/src/llamafactory/train/tuner.py",
    "axolotl": "/workspace/axolotl/src/axolotl/cli/train.py",
    "open-r1": "/root/open-r1/src/open_r1/grpo.py",
    "Megatron-LM": "/opt/Megatron-LM/megatron/core/parallel_state.py",
    "OpenRLHF": "/mnt/OpenRLHF/openrlhf/trainer/ppo_trainer.py",
    "ms-swift": "/w/ms-swift/swift/llm/train/sft.py",
    "slime": "/root/slime/slime/backends/megatron_utils/actor.py",
    "vLLM": f"{SITE}/vllm/v1/engine/core.py",
}


def traceback(*frames: str, end: str) -> list[str]:
    lines = ["Traceback (most recent call last):"]
    for frame in frames:
        path, line, function, source = frame.split("|")
        lines += [f'  File "{path}", line {line}, in {function}', f"    {source}"]
    return [*lines, end]


MINE = "/home/u/train.py|7|main|trainer.train()"


def first(log: list[str]) -> Finding:
    return diagnose(log).findings[0]


@each(("rule", "signature"), WORDINGS)
def test_a_wording_answers_its_own_sample(rule: Rule, signature: Signature) -> None:
    frames = [frame_of(f'File "{CLONES["TRL"]}", line 9, in f')] if signature.owner else []
    failure = Failure(line=1, text=signature.sample, frames=tuple(frame for frame in frames if frame))
    hit = answer_to(failure, Facts())

    assert hit is not None
    assert (hit.rule.id, hit.signature) == (rule.id, signature)


@each(("project", "path"), CLONES.items())
def test_what_a_project_raises_is_told_as_the_projects(project: str, path: str) -> None:
    finding = first(traceback(MINE, f"{path}|61|prepare|return row[name]", end="KeyError: 'chosen_input_ids'"))

    assert finding.rule == "key-missing"
    assert f"{project} looks up a key" in finding.title
    assert "/home/u/train.py:7" in str(finding.fix)


def test_the_users_own_key_is_asked_for_in_the_users_own_line() -> None:
    finding = first(traceback("/home/u/verl_runs/train.py|7|main|row['x']", end="KeyError: 'chosen_input_ids'"))

    assert (finding.rule, "the script looks it up" in finding.title) == ("key-missing", True)
    assert "/home/u/verl_runs/train.py:7" in str(finding.fix)


@pytest.mark.parametrize(
    "relay",
    [
        f"{SITE}/torch/nn/modules/module.py|1773|_call_impl|return forward_call(*args, **kwargs)",
        f"{SITE}/ray/_private/worker.py|906|get_objects|raise value.as_instanceof_cause()",
        "/usr/local/bin/trl|8|<module>|sys.exit(main())",
        f"{SITE}/fire/core.py|691|_CallAndUpdateTrace|component = fn(*varargs, **kwargs)",
    ],
)
def test_a_relay_is_never_the_one_who_raised_it(relay: str) -> None:
    end = "TypeError: Scorer.forward() missing 1 required positional argument: 'labels'"
    finding = first(traceback(MINE, relay, end=end))

    assert finding.rule == "call-mismatch"
    assert "that the script passes" in finding.title
    assert "at /home/u/train.py:7 main" in finding.title


def test_a_console_script_is_not_the_users_own_code() -> None:
    path = CLONES["TRL"]
    log = traceback("/usr/local/bin/trl|8|<module>|sys.exit(main())", f"{path}|9|f|x()", end="ZeroDivisionError: x")

    assert first(log).title.startswith(f"ZeroDivisionError: x, at {path}:9 f: TRL divides")


CREATION = (
    "The actor died because of an error raised in its creation task, ray::WorkerDict.__init__() (pid=5012, ip=10.0.0.2)"
)
DRIVER = traceback(
    "/root/verl/verl/trainer/main_ppo.py|64|main|run_ppo(config)",
    f"{SITE}/ray/_private/worker.py|906|get_objects|raise value.as_instanceof_cause()",
    end="ray.exceptions.RayTaskError(KeyError): ray::TaskRunner.run() (pid=4711, ip=10.0.0.1, repr=<TaskRunner object>)",
)
OF_THE_ACTOR = [
    '  File "/root/verl/verl/workers/reward_manager/naive.py", line 62, in __call__',
    "    ground_truth = item['reward_model']",
    "KeyError: 'reward_model'",
]


def test_of_a_task_of_ray_the_actors_own_exception_is_told() -> None:
    finding = first([*DRIVER, *OF_THE_ACTOR])

    assert finding.rule == "key-missing"
    assert "at /root/verl/verl/workers/reward_manager/naive.py:62 __call__: verl looks up" in finding.title


def test_of_an_actor_that_failed_in_its_creation_the_exception_and_the_worker_are_told() -> None:
    worker = "(WorkerDict pid=5012, ip=10.0.0.2) "
    other = "(WorkerDict pid=5013, ip=10.0.0.2) step 1"
    said = [f"{worker}{line}" for line in (f"Exception raised in creation task: {CREATION}", *OF_THE_ACTOR)]
    finding = first([other, *said, *DRIVER[:-1], f"ray.exceptions.ActorDiedError: {CREATION}", *OF_THE_ACTOR])

    assert finding.rule == "key-missing"
    assert finding.title.startswith("WorkerDict pid=5012, ip=10.0.0.2: KeyError: 'reward_model', at /root/verl/")


def test_of_a_worker_that_ray_killed_its_host_and_its_memory_are_told() -> None:
    finding = first(
        [
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
            "Memory on the node (IP: 10.0.0.2, ID: c1) where the task (actor ID: 3a1, name=WorkerDict.__init__, pid=5012, "
            "memory used=45.20GB) was running was 243.11GB / 250.00GB (0.95), which exceeds the memory usage threshold of 0.95.",
        ]
    )

    assert finding.rule == "ray-worker-died"
    assert [word in finding.title for word in ("10.0.0.2", "243.11GB of 250.00GB", "5012", "45.20GB")] == [True] * 4


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("/root/.cache/huggingface/modules/transformers_modules/moonlight/modeling.py", "the model's own code"),
        ("/vllm-workspace/vllm-ascend/vllm_ascend/worker/worker_v1.py", "vLLM Ascend"),
        ("/home/u/verl-tool/verl_tool/trainer/main_ppo.py", ""),
    ],
)
def test_what_was_downloaded_with_a_model_is_not_the_users_own_code(path: str, owner: str) -> None:
    frame = frame_of(f'File "{path}", line 9, in f')

    assert frame is not None
    assert frame.owner == owner


def test_a_missing_submodule_is_the_fault_of_who_asks_for_it() -> None:
    relay = f"{SITE}/torch/nn/modules/module.py|1962|__getattr__|raise AttributeError("
    end = "AttributeError: 'GPT2LMHeadModel' object has no attribute 'model'"
    finding = first(traceback("/home/u/train.py|7|main|model.model.layers", relay, end=end))

    assert (finding.rule, "may not fit" in finding.title) == ("attribute-missing", False)
    assert "/home/u/train.py:7" in str(finding.fix)


def test_a_name_of_a_weight_is_no_column_of_a_dataset() -> None:
    path = f"{SITE}/vllm/model_executor/models/qwen2.py"
    end = "KeyError: 'layers.0.self_attn.qkv_proj.base_layer.weight'"
    finding = first(traceback(MINE, f"{path}|391|load_weights|param = params_dict[name]", end=end))

    assert finding.rule == "weight-unknown"


def test_an_actors_own_exception_comes_before_its_death() -> None:
    worker = "(ActorModelRayActor pid=700388) "
    own = traceback(f"{SITE}/vllm/llm.py|495|rpc|self.x", end="AttributeError: 'LLMEngine' object has no attribute 'x'")
    died = ["ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "\tpid: 700388"]
    finding = first([*(worker + line for line in own), *DRIVER[:-1], *died])

    assert finding.rule == "attribute-missing"
