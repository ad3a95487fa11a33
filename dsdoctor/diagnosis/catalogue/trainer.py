"""Rules of what Hugging Face's Trainer and trl say of the model, the data and the optimizer that they are given."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

TRAINER_DATA_MISSING = Rule(
    id="trainer-data-missing",
    stage=Stage.RUN,
    title="the Trainer was not given the data that it is to use: {what}",
    fix="hand over train_dataset (and eval_dataset, or eval_strategy no); for a data set without a length set "
    "max_steps",
    manual="""The Trainer needs a data set for what it was told to do, and has none, or one without a length.

Why it matters: The training does not begin.""",
    signatures=(
        Signature(
            words="trainer+requires+train_dataset trainer+requires+eval_dataset",
            pattern=r"ValueError: Trainer: (?P<what>(?:training|evaluation) requires an? (?:train|eval)_dataset)",
            sample="ValueError: Trainer: training requires a train_dataset.",
        ),
        Signature(
            words="pass+eval_dataset",
            pattern=r"ValueError: (?P<what>You have set `args\.(?:eval_strategy|evaluation_strategy)` to \S{1,60} but "
            r"you didn't pass an "
            r"`eval_dataset`)",
            sample="ValueError: You have set `args.eval_strategy` to IntervalStrategy.STEPS but you didn't pass an "
            "`eval_dataset` to `Trainer`.",
        ),
        Signature(
            words="max_steps+length max_steps+specified max_steps+__len__",
            pattern=r"ValueError: (?P<what>The train_dataset does not implement __len__.{0,60}|args\.max_steps must "
            r"be set to a positive value if "
            r"dataloader does not have a length.{0,40})",
            title="a data set without a length (streaming, IterableDataset) needs max_steps: {what}",
            fix="set max_steps in the TrainingArguments; the learning rate's schedule counts with it as well",
            sample="ValueError: The train_dataset does not implement __len__, max_steps has to be specified.",
        ),
        Signature(
            words="batch+received+empty",
            pattern=r"ValueError: (?P<what>The batch received was empty, your model won't be able to train on it)",
            title="the batches are empty: no column of the data set has a name that the model knows",
            fix="name the columns as the model's forward does (input_ids, labels, ...), or set "
            "remove_unused_columns=False",
            sample="ValueError: The batch received was empty, your model won't be able to train on it.",
        ),
    ),
)

TRAINER_METRIC_MISSING = Rule(
    id="trainer-metric-missing",
    stage=Stage.RUN,
    title="metric_for_best_model is {name}, and the evaluation gives no such figure",
    fix="name one that the evaluation prints (with or without eval_), make compute_metrics return it, or set "
    "load_best_model_at_end=False",
    manual="""The best checkpoint is to be found by a figure of the evaluation that is not there.

With prediction_loss_only, without labels, or without compute_metrics there is eval_loss at most.

Why it matters: The training ends at its first evaluation.""",
    signatures=(
        Signature(
            words="metric_for_best_model+found",
            pattern=r"The `metric_for_best_model` training argument is set to '(?P<name>[^']{1,60})', which is not "
            r"found",
            sample="KeyError: \"The `metric_for_best_model` training argument is set to 'eval_f1', which is not found "
            'in the evaluation metrics."',
        ),
        Signature(
            words="keyerror+eval_loss keyerror+eval_accuracy keyerror+eval_f1",
            pattern=r"^KeyError: '(?P<name>eval_\w{1,40})'",
            after=r"trainer\.py",
            tier=Tier.GENERIC,
            sample='  File "/v/transformers/trainer.py", line 2300, in _maybe_log_save_evaluate\n'
            "KeyError: 'eval_loss'",
        ),
    ),
)

CHECKPOINT_OF_OTHER_DEVICE = Rule(
    id="checkpoint-of-other-device",
    stage=Stage.RUN,
    title="the file was saved from a GPU that this process does not have: {what}",
    fix="load it with torch.load(..., map_location='cpu'), or map_location to the rank's own device",
    steps=(step("nvidia-smi"),),
    manual="""torch puts each tensor of a file back on the device from which it was saved, unless map_location
says another.

A file of GPU 3 cannot be read where there is one GPU, nor one of a GPU where there is none.

Why it matters: The checkpoint cannot be loaded.""",
    signatures=(
        Signature(
            words="attempting+deserialize",
            pattern=r"RuntimeError: Attempting to deserialize object on (?:a )?(?P<what>(?:CUDA|cuda|HPU|XPU|NPU) "
            r"device.{0,80})",
            sample="RuntimeError: Attempting to deserialize object on CUDA device 3 but torch.cuda.device_count() is "
            "1.",
        ),
    ),
)

DATALOADER_OPTIONS = Rule(
    id="dataloader-options",
    stage=Stage.RUN,
    title="the DataLoader does not take these options together: {what}",
    fix="with num_workers=0 leave prefetch_factor, persistent_workers, timeout and multiprocessing_context out "
    "(dataloader_num_workers in the "
    "TrainingArguments); with a sampler leave shuffle out",
    manual="""Some options of torch's DataLoader are for worker processes only, and others exclude each other.

Why it matters: The data loader cannot be made.""",
    signatures=(
        Signature(
            words="prefetch_factor+option persistent_workers+option multiprocessing_context+option "
            "option+mutually+exclusive option+iterabledataset",
            pattern=r"ValueError: (?P<what>(?:prefetch_factor|persistent_workers|multiprocessing_context|sampler|batch"
            r"_sampler|batch_size=None) option"
            r".{1,100}|multiprocessing_context can only.{1,80}|DataLoader with IterableDataset: expected unspecified "
            r"\w{1,20} option.{0,60})",
            sample="ValueError: persistent_workers option needs num_workers > 0",
        ),
        Signature(
            words="dataloader+timed",
            pattern=r"RuntimeError: (?P<what>DataLoader timed out after [\d.]{1,12} seconds)",
            title="the data came too late: {what}; a worker hangs or reads slowly (network disk, a lock)",
            fix="raise the DataLoader's timeout, use more workers, keep the data on a local disk; py-spy shows where "
            "a worker stands",
            steps=(step("py-spy dump --pid PID"),),
            sample="RuntimeError: DataLoader timed out after 60 seconds",
        ),
        Signature(
            words="pin+memory+thread",
            pattern=r"RuntimeError: (?P<what>Pin memory thread exited unexpectedly)",
            title="the thread that copies batches into pinned memory ended: memory ran out, or a worker passed on "
            "what cannot be pinned",
            fix="look for an error of a worker above; set pin_memory=False, use fewer workers, and give the container "
            "more shared memory (--shm-size)",
            steps=(step("df -h /dev/shm"), step("free -g")),
            sample="RuntimeError: Pin memory thread exited unexpectedly",
        ),
    ),
)

SHAPES_DIFFER = Rule(
    id="shapes-differ",
    stage=Stage.RUN,
    title="the shapes of two tensors do not fit: {what}",
    fix="print the shapes at the last line of your own code in the traceback: lengths of padded inputs and labels, "
    "hidden sizes, number of heads, or "
    "images of another size. If one of them is 0, it is a weight that ZeRO-3 has divided",
    manual="""An operation got tensors whose sizes do not go together.

Batches that were padded to different lengths, a configuration that does not fit the weights, or a model's code of
another version.

Why it matters: The step fails, on every rank that gets such a batch.""",
    explained_by=("zero3-partitioned-weight", "hf-quantized-under-zero3", "checkpoint-other-model"),
    signatures=(
        Signature(
            words="size+tensor+match sizes+tensors+match",
            pattern=r"^RuntimeError: (?P<what>The (?:size of tensor a \((?!0\))\d{1,12}\) must match the size of "
            r"tensor b \((?!0\))\d{1,12}\)|expanded size of the "
            r"tensor \((?!0\))\d{1,12}\) must match the existing size \((?!0\))\d{1,12}\))|Sizes of tensors must "
            r"match except in dimension .{1,80})",
            not_after=r"deepspeed[/\\](?:runtime[/\\](?:zero|pipe)|sequence|moe|module_inject)[/\\]",
            tier=Tier.GENERIC,
            sample="RuntimeError: The size of tensor a (2048) must match the size of tensor b (1024) at non-singleton "
            "dimension 3",
        ),
        Signature(
            words="mat1+mat2+shapes shape+invalid+size",
            pattern=r"^RuntimeError: (?P<what>mat1 and mat2 shapes cannot be multiplied \((?!0x)\d{1,12}x\d{1,12} and "
            r"(?![01]x)\d{1,12}x(?!0\))\d{1,12}\)|shape '\[(?:-?[1-9]\d{0,9}(?:, )?){1,8}\]' is invalid for "
            r"input of size (?!0\b)\d{1,15})",
            not_after=r"deepspeed[/\\](?:runtime[/\\](?:zero|pipe)|sequence|moe|module_inject|inference)[/\\]",
            tier=Tier.GENERIC,
            sample="RuntimeError: mat1 and mat2 shapes cannot be multiplied (512x1024 and 4096x4096)",
        ),
    ),
)

RULES = (
    TRAINER_DATA_MISSING,
    TRAINER_METRIC_MISSING,
    CHECKPOINT_OF_OTHER_DEVICE,
    DATALOADER_OPTIONS,
    SHAPES_DIFFER,
)
