"""Rules of converting DeepSpeed's checkpoints, and of loading the states of an optimizer that do not fit."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

ZERO_TO_FP32_FAILED = Rule(
    id="zero-to-fp32-failed",
    stage=Stage.RUN,
    title="zero_to_fp32.py cannot make whole weights of this checkpoint: {why}",
    fix="run the script of the newest DeepSpeed on the folder that holds `latest`, with the shards of all ranks in it",
    steps=(
        step("python -m pip install -U deepspeed"),
        step("python -m deepspeed.utils.zero_to_fp32 CKPT OUTPUT"),
    ),
    manual="""zero_to_fp32.py puts the parts of the fp32 weights together that ZeRO's optimizer saved.

It needs the optim_states of all ranks, of one run, of ZeRO stage 1, 2 or 3. Each checkpoint carries the script of the
DeepSpeed that saved it, with that release's faults; the newest release reads older checkpoints. Stage 0 has no such
parts: its mp_rank_00_model_states.pt holds the whole weights under "module" already.

Why it matters: The weights stay in parts that no other program reads.""",
    signatures=(
        Signature(
            words="zero+checkpoint",
            pattern=r"ValueError: (?P<why>\S{1,200} is not a zero checkpoint)",
            title="{why}: it was saved with ZeRO stage 0, or its optimizer states are not of ZeRO",
            fix="with stage 0 there is nothing to put together: load mp_rank_00_model_states.pt and take its entry "
            '"module"',
            steps=(step("ls -l CKPT/TAG"),),
            sample="ValueError: ./global_step10/mp_rank_00_optim_states.pt is not a zero checkpoint",
        ),
        Signature(
            words="keyerror+optimizer_state_dict keyerror+zero_stage keyerror+param_shapes keyerror+fp32_flat_groups "
            "keyerror+partition_count keyerror+buffer_names",
            pattern=r"^KeyError: ['\"](?P<why>optimizer_state_dict|zero_stage|param_shapes|fp32_flat_groups|partition_"
            r"count|buffer_names)",
            after=r"zero_to_fp32",
            title="zero_to_fp32.py misses {why}: the checkpoint is of ZeRO stage 0 (no zero checkpoint), or of "
            "another release than the script",
            sample="  File \"zero_to_fp32.py\", line 152, in parse_optim_states\nKeyError: 'optimizer_state_dict'",
        ),
        Signature(
            words="zero+files+found",
            pattern=r"AssertionError: (?P<why>No ZeRO files found in \S{1,200})",
            title="there are no ZeRO files (optim_states.pt) in the checkpoint: {why}",
            fix="give the folder of the tag (global_step10) that holds *_optim_states.pt; a run of ZeRO stage 0, or a "
            "checkpoint that was copied without its optimizer states, has none, and the conversion needs them",
            steps=(step("ls -l CKPT/TAG"),),
            sample="AssertionError: No ZeRO files found in checkpoints/main/global_step1/",
        ),
        Signature(
            words="unknown+zero+stage",
            pattern=r"ValueError: (?P<why>unknown zero stage \d)",
            sample="ValueError: unknown zero stage 1",
        ),
        Signature(
            words="consumed+numels",
            pattern=r"ValueError: (?P<why>consumed \d{1,15} numels out of \d{1,15})",
            title="zero_to_fp32.py ends with other sizes than it began with ({why}): shards of several runs are "
            "mixed, tied (shared) or frozen "
            "parameters are counted wrongly, or the script is too old",
            sample="ValueError: consumed 2160522 numels out of 2160524 - something is wrong",
        ),
        Signature(
            words="tensors+device",
            pattern=r"RuntimeError: Expected all tensors to be on the same device",
            after=r"zero_to_fp32",
            title="zero_to_fp32.py of an old DeepSpeed loads each shard to its own GPU (no map_location): {why|they "
            "cannot be put together there}",
            fix="take the zero_to_fp32.py of a newer DeepSpeed, which loads to the CPU; or hide the GPUs",
            steps=(step("CUDA_VISIBLE_DEVICES= python zero_to_fp32.py CKPT OUTPUT"),),
            sample='  File "zero_to_fp32.py", line 121, in convert\n'
            "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
            "cuda:1!",
        ),
        Signature(
            words="cannot+find+zero failed+reconstruct",
            pattern=r"(?:ValueError|AssertionError|RuntimeError): (?P<why>Failed to reconstruct .{1,100})",
            after=r"zero_to_fp32",
            sample='  File "zero_to_fp32.py", line 400, in zero3\nValueError: Failed to reconstruct the state dict',
        ),
    ),
)

OPTIMIZER_STATES_DO_NOT_FIT = Rule(
    id="optimizer-states-do-not-fit",
    stage=Stage.RUN,
    title="the optimizer states of the checkpoint do not fit this optimizer: {why|groups or keys differ}",
    fix="resume with the optimizer, the parameter groups and the frozen layers that the checkpoint was saved with "
    "(and the same releases of "
    "torch and DeepSpeed); or load the weights alone: load_optimizer_states=False in engine.load_checkpoint, no "
    "resume_from_checkpoint",
    steps=(step("ls -l CKPT/TAG"),),
    manual="""An optimizer was given saved states whose groups, sizes or keys are others than its own.

Another optimizer, layers that were frozen or thawed since, weights-only checkpoints, and wrappers that save None for
the optimizer (ZeRO saves its states in files of their own) do that.

Why it matters: The run cannot be resumed from this checkpoint as it is.""",
    signatures=(
        Signature(
            words="parameter+optimizer+group parameter+groups+loaded",
            pattern=r"ValueError: (?P<why>loaded state dict (?:contains a parameter group that doesn't match the size "
            r"of optimizer's group|has "
            r"a different number of parameter groups))",
            sample="ValueError: loaded state dict contains a parameter group that doesn't match the size of "
            "optimizer's group",
        ),
        Signature(
            words="keyerror+param_groups keyerror+step keyerror+exp_avg keyerror+optimizer keyerror+state "
            "keyerror+base_optimizer_state "
            "keyerror+single_partition_of_fp32_groups",
            pattern=r"^KeyError: ['\"](?P<why>param_groups|step|exp_avg|optimizer|state|base_optimizer_state|single_pa"
            r"rtition_of_fp32_groups)['\"]",
            after=r"load_state_dict|__setstate__|load_checkpoint|load_optimizer",
            tier=Tier.GENERIC,
            title="the optimizer states of the checkpoint have no {why}: they are of another optimizer or release, or "
            "were not saved",
            sample="  File \"/venv/torch/optim/optimizer.py\", line 108, in load_state_dict\nKeyError: 'param_groups'",
        ),
        Signature(
            words="nonetype+subscriptable nonetype+iterable",
            pattern=r"^TypeError: (?P<why>'NoneType' object is not (?:subscriptable|iterable))",
            after=r"self\.optimizer\.load_state_dict\(|in load_state_dict\b.{0,20}$|state_dict\['(?:param_groups|state"
            r")'\]",
            tier=Tier.GENERIC,
            title="the checkpoint has no optimizer state in the file that is read (None): it was saved without, or "
            "its states are in ZeRO's own "
            "files, of another DeepSpeed version",
            sample="    self.optimizer.load_state_dict(checkpoint['optimizer'])\nTypeError: 'NoneType' object is not "
            "subscriptable",
        ),
        Signature(
            words="runtimeerror+size+mismatch",
            pattern=r"^RuntimeError: [Ss]ize mismatch(?: among tensors| in)?\s*$",
            after=r"multi_tensor_apply|fused_adam",
            tier=Tier.GENERIC,
            title="the optimizer's states (exp_avg) have another size than the parameters: they were resumed from a "
            "checkpoint of another model or other trainable parameters",
            fix="resume with the same trainable parameters in the same order (LoRA, frozen layers, added tokens) and "
            "the same packages; or load the weights only: load_optimizer_states=False in load_checkpoint, or give the "
            "Trainer the model's path instead of resume_from_checkpoint",
            steps=(step("ls -l CKPT/TAG"),),
            sample='  File "/venv/lib/python3.11/site-packages/deepspeed/ops/adam/multi_tensor_apply.py", line 17, in '
            "__call__\nRuntimeError: Size mismatch",
        ),
    ),
)

WEIGHTS_SHARED_ON_SAVE = Rule(
    id="weights-shared-on-save",
    stage=Stage.RUN,
    title="weights that share memory (tied weights) cannot be saved as safetensors",
    fix="save with save_safetensors=False in the TrainingArguments, or safe_serialization=False in save_pretrained; "
    "or tie the weights in a way "
    "that the model's class knows (_tied_weights_keys), with a newer transformers",
    steps=(step("python -m pip install -U transformers accelerate safetensors"),),
    manual="""safetensors writes each tensor by itself, and refuses tensors that are views of the same memory.

Input and output embeddings are often one tensor. transformers leaves one out where its class names them; under ZeRO-3
gathered weights may lose that tie.

Why it matters: The checkpoint is not saved.""",
    signatures=(
        Signature(
            words="share+memory+disk shared+tensors+saved",
            pattern=r"Some tensors share memory, this will lead to duplicate memory on disk|The weights trying to be "
            r"saved contained shared tensors",
            sample="Some tensors share memory, this will lead to duplicate memory on disk and potential differences "
            "when loading them again: "
            "[{'lm_head.weight', 'model.embed_tokens.weight'}].",
        ),
    ),
)

RULES = (
    ZERO_TO_FP32_FAILED,
    OPTIMIZER_STATES_DO_NOT_FIT,
    WEIGHTS_SHARED_ON_SAVE,
)
