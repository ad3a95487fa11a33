"""Rules of Megatron-DeepSpeed and GPT-NeoX: the size of the data set, the parallel sizes of a checkpoint."""

from dsdoctor.diagnosis.models import Rule, Signature, Stage

MEGATRON_DATA_TOO_SMALL = Rule(
    id="megatron-data-too-small",
    stage=Stage.RUN,
    title="the data set is too small for the samples that the training asks of it{what_hint}",
    fix="lower --train-iters (and lr-decay-iters, eval-iters), the micro batch size or --seq-length, or give a larger data set; "
    "see that --split leaves each part more than one sample, and remove old index maps (*.npy) beside the data",
    manual="""Megatron computes from iterations and batch size how many samples are needed, and builds index maps of whole epochs.

A small data set, or a part of it that --split made small, has fewer tokens than one sample, or its last epoch comes out longer
than a whole one.

Why it matters: The data set cannot be built, and no step is made.""",
    signatures=(
        Signature(
            words="last+epoch+samples",
            pattern=r"AssertionError: (?P<what>last epoch number of samples|last_epoch_num_samples)",
            sample="AssertionError: last epoch number of samples exceeded max value.",
        ),
    ),
)

MEGATRON_CHECKPOINT_SIZES = Rule(
    id="megatron-checkpoint-sizes",
    stage=Stage.RUN,
    title="the checkpoint was written with another {size|parallel size} ({there|another number}) than this run has{here_hint}",
    fix="start with the parallel sizes that the checkpoint was written with, or convert it first: Megatron's tools for "
    "checkpoints, DeepSpeed's ds_to_universal.py and --universal-checkpoint",
    manual="""Weights are divided among tensor- and pipeline-parallel ranks, and each rank's file holds its part only.

Arguments of the checkpoint are compared with those of the run.

Why it matters: Loading stops, or would put wrong parts together.""",
    signatures=(
        Signature(
            words="loading+checkpoint+mp",
            pattern=r"Error: Loading a checkpoint for (?P<size>MP|PP|TP)=(?P<there>\d{1,5}) when world size is (?P<here>\d{1,5})",
            sample="ValueError: Loading a checkpoint for MP=2 when world size is 1",
        ),
        Signature(
            words="checkpoint+value+argument",
            pattern=r"AssertionError: (?P<size>\w{1,60}) value from checkpoint \((?P<there>[^)]{1,40})\) is not equal to"
            r" the (?:input|"
            r"currently set) argument value \((?P<here>[^)]{1,40})\)",
            title="{size} of the checkpoint is {there}, and this run has {here}",
            fix="start with the arguments that the checkpoint was written with; parallel sizes can be changed by converting it, "
            "sizes of the model cannot",
            sample="AssertionError: tensor_model_parallel_size value from checkpoint (2) is not equal to the input "
            "argument value (1).",
        ),
    ),
)

RULES = (MEGATRON_DATA_TOO_SMALL, MEGATRON_CHECKPOINT_SIZES)
