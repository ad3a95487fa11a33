"""Rules of accelerate's launcher, and of the engine and the stand-ins that its prepare() makes for DeepSpeed."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

ACCELERATE_MACHINE_RANK = Rule(
    id="accelerate-launch-incomplete",
    stage=Stage.LAUNCH,
    title="accelerate launch was not told which node this is: --machine_rank is missing",
    fix="give each node its own --machine_rank (0, 1, ...; $SLURM_NODEID under Slurm), and all of them the same "
    "--num_machines, "
    "--num_processes, --main_process_ip and --main_process_port",
    steps=(
        step(
            "accelerate launch --machine_rank 0 --num_machines 2 --main_process_ip HOST --main_process_port 29500 "
            "SCRIPT.py"
        ),
    ),
    manual="""With several machines accelerate has to know the number of each of them.

Why it matters: No rank is started on this node.""",
    signatures=(
        Signature(
            words="int+nonetype",
            pattern=r"^TypeError: int\(\) argument must be a string, a bytes-like object or a (?:real )?number, not "
            r"'NoneType'",
            after=r"args\.machine_rank|in prepare_multi_gpu_env|in _get_mpirun_args",
            sample='  File "/v/accelerate/utils/launch.py", line 114, in prepare_multi_gpu_env\n'
            "TypeError: int() argument must be a string, a bytes-like object or a number, not 'NoneType'",
        ),
        Signature(
            words="config+unknown+keys",
            pattern=r"ValueError: The config file at (?P<file>\S{1,160}) had unknown keys \((?P<keys>.{1,120}?)\),",
            title="accelerate does not know these keys of {file}: {keys}",
            fix="remove them, or upgrade accelerate: the file was written by a newer one (accelerate config writes a "
            "new one)",
            steps=(step("python -m pip install -U accelerate"), instead("accelerate config")),
            sample="ValueError: The config file at accelerate.yaml had unknown keys (['lr_scheduler']), please try "
            "upgrading your `accelerate` version",
        ),
    ),
)

ACCELERATE_ENGINE_MISSING = Rule(
    id="accelerate-engine-missing",
    stage=Stage.RUN,
    title="accelerate has no {name}: prepare() did not make DeepSpeed's engine, because accelerate and transformers "
    "are of versions that do not "
    "fit together, or the model was not given to prepare()",
    fix="upgrade accelerate and transformers together (accelerate 0.30.1 for a transformers of that time), and give "
    "model, optimizer and data "
    "loader to accelerator.prepare() before backward",
    steps=(
        step("python -m pip install -U accelerate transformers"),
        instead("python -m pip install accelerate==0.30.1"),
    ),
    manual="""Accelerator.prepare() makes the engine, and its other functions use it.

A Trainer of another version, or one that a script has overridden, may make the engine by itself, and then accelerate
knows nothing of it.

Why it matters: The first backward, or the first save, fails.""",
    signatures=(
        Signature(
            words="nonetype+backward",
            pattern=r"^AttributeError: 'NoneType' object has no attribute 'backward'",
            after=r"deepspeed_engine_wrapped\.backward",
            title="accelerate has no engine of DeepSpeed to run the backward with: no model was given to this "
            "Accelerator's prepare(), "
            "or another Accelerator holds it",
            fix="give model, optimizer and data loader to prepare() of the Accelerator whose backward is called; make one "
            "Accelerator only (a trainer makes its own), and use transformers, trl and accelerate releases of one time",
            sample="    self.deepspeed_engine_wrapped.backward(loss, **kwargs)\n"
            "AttributeError: 'NoneType' object has no attribute 'backward'",
        ),
        Signature(
            words="accelerator+deepspeed_engine_wrapped accelerator+deepspeed_config accelerator+deepspeed_plugin",
            pattern=r"AttributeError: 'Accelerator' object has no attribute '(?P<name>deepspeed_engine_wrapped|deepspe"
            r"ed_config|deepspeed_plugin)'",
            sample="AttributeError: 'Accelerator' object has no attribute 'deepspeed_engine_wrapped'",
        ),
        Signature(
            words="hfdeepspeedconfig+attribute hftrainerdeepspeedconfig+attribute",
            pattern=r"AttributeError: '(?P<class>Hf(?:Trainer)?DeepSpeedConfig)' object has no attribute "
            r"'(?P<name>\w{1,60})'",
            title="the script made a {class} where the Trainer of this transformers wants another ({name} is missing)",
            fix="let TrainingArguments(deepspeed=...) make it, or use HfTrainerDeepSpeedConfig; else take the "
            "transformers version that the "
            "script was written for",
            steps=(step("python -m pip show transformers accelerate"),),
            sample="AttributeError: 'HfDeepSpeedConfig' object has no attribute 'trainer_config_finalize'",
        ),
        Signature(
            words="optimizer+configured+scheduler",
            pattern=r"ValueError: Found `optimizer` configured in the DeepSpeed config, but no `scheduler`",
            title="the DeepSpeed config has an optimizer and no scheduler, which transformers 4.30 refuses",
            fix="add a scheduler (WarmupLR with auto values) to the config, or remove the optimizer from it; newer "
            "transformers take an optimizer "
            "without a scheduler",
            steps=(step("python -m pip install -U transformers accelerate"),),
            sample="ValueError: Found `optimizer` configured in the DeepSpeed config, but no `scheduler`. Please "
            "configure a scheduler in the "
            "DeepSpeed config.",
        ),
        Signature(
            words="attribute+step_was_skipped",
            pattern=r"AttributeError: '(?P<class>\w{1,60})' object has no attribute '(?P<name>step_was_skipped)'",
            title="accelerate asks DeepSpeed's optimizer for {name}: this accelerate is too old, or the optimizer is "
            "not the one that prepare() gave "
            "back",
            fix="upgrade accelerate, and use the optimizer and the scheduler that accelerator.prepare() gives back",
            steps=(step("python -m pip install -U accelerate"),),
            sample="AttributeError: 'DeepSpeedZeroOptimizer' object has no attribute 'step_was_skipped'",
        ),
    ),
)

NOTEBOOK_LAUNCH = Rule(
    id="notebook-launch",
    stage=Stage.LAUNCH,
    title="the notebook has used CUDA or made an Accelerator already, so no ranks can be forked from it",
    fix="restart the notebook, import and make everything (Accelerator, model, .cuda()) inside of the function that "
    "notebook_launcher gets; "
    "DeepSpeed itself is best started from a cell as a script",
    steps=(step("deepspeed --num_gpus 1 train.py"),),
    manual="""notebook_launcher forks the ranks from the notebook's own process, and a forked process cannot use a
CUDA that its parent has begun.

Why it matters: No rank is started at all.""",
    signatures=(
        Signature(
            words="notebook+accelerator+initialized notebook+cuda+initialized notebook+cuda+avoid",
            pattern=r"ValueError: To launch a (?:multi-GPU|TPU) training from your notebook, (?:the `Accelerator` "
            r"should only be initialized|you need "
            r"to avoid running any instruction using `torch\.cuda`)",
            sample="ValueError: To launch a multi-GPU training from your notebook, the `Accelerator` should only be "
            "initialized inside your "
            "training function.",
        ),
    ),
)

RULES = (ACCELERATE_MACHINE_RANK, ACCELERATE_ENGINE_MISSING, NOTEBOOK_LAUNCH)
