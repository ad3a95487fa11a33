"""Rules of a checkpoint's files: missing, cut off, not written, or not there at all."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

READING = r"torch[/\\]serialization\.py|checkpoint_engine\.py|PyTorchFileReader"
"""Frames of reading a file of torch."""

CHECKPOINT_SHARD_MISSING = Rule(
    id="checkpoint-shard-missing",
    stage=Stage.RUN,
    title="a file of the checkpoint is missing{file_hint}",
    fix="see that the folder holds the shards of all ranks: on a disk of each node's own, each node has only its "
    "part. Use a shared folder, or copy all parts together; a save that was interrupted has to be left out (see "
    "the file `latest`)",
    steps=(
        step("python -m dsdoctor checkpoint CKPT", note="names the files that are missing, and which tag is whole"),
    ),
    manual="""A rank looks for a shard of the checkpoint and does not find it.

Every rank writes a file of its own: zero_pp_rank_N_mp_rank_00_optim_states.pt, under ZeRO-3 also model_states. The
names depend on the ZeRO stage, on bf16 (bf16_zero_pp_...) and on the number of ranks, so another configuration looks
for other names. `latest` names the folder that is loaded.

Why it matters: The rank ends; the others report a broken connection.""",
    signatures=(
        Signature(
            words="filenotfounderror errno+2",
            pattern=r"No such file or directory: "
            r"'(?P<file>[^']{0,200}?(?:_optim_states|_model_states|expert_\d{1,5}\w{0,60}"
            r"|mp_rank_\d\d\w{0,40})\.pt)'",
            sample="FileNotFoundError: [Errno 2] No such file or directory: "
            "'ckpt/global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt'",
        ),
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"assert len\(self\.ckpt_list\) > 0",
            title="the checkpoint has none of the files that this rank looks for: shards (zero_pp_rank_N...) are "
            "missing here, or it was written with another ZeRO stage",
            fix="compare the files with the configuration: model_states named zero_pp_rank_* are of ZeRO stage "
            "3, mp_rank_00 of stages 0 to 2. Load with the stage it was written with; if only one node fails, "
            "the other nodes' shards are missing on its disk",
            sample="    assert len(self.ckpt_list) > 0\nAssertionError",
        ),
        Signature(
            words="directory+find+files find+states+file expert+checkpoint+found",
            pattern=r"FileNotFoundError: (?:can't find (?:ZeRO Stage 3 )?\S{1,60} (?:model )?(?:state )?files? "
            r"(?:in directory|at) "
            r"'(?P<file>[^']{1,200})'|Expert checkpoint file not found: (?P<file2>\S{1,200})"
            r"|Missing ZeRO optimizer checkpoint for rank \d{1,6})",
            sample="FileNotFoundError: can't find *_optim_states.pt files in directory 'ckpt/global_step2'",
        ),
    ),
)

CHECKPOINT_DAMAGED = Rule(
    id="checkpoint-damaged",
    stage=Stage.RUN,
    title="a file of the checkpoint is incomplete or damaged (truncated, or still being written)",
    fix="resume from the checkpoint before it: write its tag into `latest`, or give the tag; compare the sizes "
    "of the shards. An interrupted save, a full disk, or a shared file system that was not done are the usual "
    "reasons",
    steps=(
        step(
            "python -m dsdoctor checkpoint CKPT",
            note="names the file that is not whole; --repair sets a cut-off tag aside",
        ),
        step("df -h CKPT"),
    ),
    manual="""A file was read that ends too early, or is no file of torch at all.

torch's files are ZIP archives whose directory stands at the end: what was cut off has none. A save that was killed, a
full disk or quota, a copy that broke off, or another node's write that the shared file system does not show yet.

Why it matters: This checkpoint cannot be loaded, and the run would have to start from an older one.""",
    signatures=(
        Signature(
            words="pytorchstreamreader",
            pattern=r"PytorchStreamReader failed (?:reading zip archive|locating file|reading "
            r"file|getting)(?P<problem>: [\w /-]{1,60})?",
            title="a file of the checkpoint is incomplete or damaged (truncated): torch cannot read it{problem}",
            sample="RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        ),
        Signature(
            words="eoferror",
            pattern=r"^EOFError: Ran out of input",
            after=READING,
            title="a file of the checkpoint (mp_rank_00_model_states.pt or a shard) is empty: the save was "
            "interrupted or the disk full",
            sample='  File "/venv/torch/serialization.py", line 1886, in _legacy_load\nEOFError: Ran out of input',
        ),
        Signature(
            words="errno+22",
            pattern=r"^OSError: \[Errno 22\] Invalid argument",
            after=READING,
            sample="    super().__init__(torch._C.PyTorchFileReader(name_or_buffer))\n"
            "OSError: [Errno 22] Invalid argument",
        ),
        Signature(
            words="eof+corrupted magic+corrupt storage+size",
            pattern=r"^RuntimeError: (?:unexpected EOF, expected \d{1,20} more bytes|Invalid magic number; "
            r"corrupt file|storage has wrong "
            r"(?:byte )?size)",
            sample="RuntimeError: unexpected EOF, expected 412 more bytes. The file might be corrupted.",
        ),
        Signature(
            words="unpicklingerror",
            pattern=r"^(?:_pickle\.)?UnpicklingError: (?:invalid load key|pickle data was truncated|unpickling "
            r"stack underflow)",
            after=READING,
            sample='  File "/venv/torch/serialization.py", line 1000, in load\n'
            "_pickle.UnpicklingError: invalid load key, '\\x00'.",
        ),
        Signature(
            words="unable+weights+checkpoint",
            pattern=r"^OSError: Unable to load weights from pytorch checkpoint file for '(?P<path>[^']{1,200})'",
            title="the weights in {path} cannot be read: the file is not whole, or several processes load it at once and "
            "memory runs out",
            fix="compare its size with that on the hub and fetch it again; where it is whole, watch the host's memory while "
            "it loads, and take safetensors, which are read without a copy",
            steps=(step("ls -l {path}"), step("free -g")),
            tier=Tier.GENERIC,
            sample="OSError: Unable to load weights from pytorch checkpoint file for '/m/pytorch_model-00001-of-00003.bin' at "
            "'/m/pytorch_model-00001-of-00003.bin'.",
        ),
        Signature(
            words="safetensorerror",
            pattern=r"SafetensorError: Error while deserializing header: ?(?P<problem>[\w ,]{1,80})",
            title="a safetensors file is incomplete or no such file: {problem}",
            fix="fetch or save it again; a file of a few hundred bytes is a pointer of git-lfs (git lfs pull)",
            steps=(step("ls -l MODEL/*.safetensors"),),
            sample="safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete "
            "metadata, file not fully covered",
        ),
    ),
)

CHECKPOINT_NOT_WRITTEN = Rule(
    id="checkpoint-not-written",
    stage=Stage.RUN,
    title="a checkpoint could not be written: most likely no space is left on the disk, or a quota is reached",
    fix="make space, keep fewer checkpoints (save_total_limit), or write to another disk; remove what was "
    "written in part",
    steps=(
        step("df -h ."),
        step("df -i ."),
        step("quota -s"),
        step("python -m dsdoctor checkpoint CKPT", note="which tag is whole"),
    ),
    explained_by=("disk-full",),
    manual="""torch could not write the whole of a file.

Its message speaks of a position in the file: fewer bytes arrived than were written. A full disk, a quota, or a
network file system that broke off.

Why it matters: The checkpoint is useless; the rank ends, and the others wait for it.""",
    signatures=(
        Signature(
            words="pytorchstreamwriter",
            pattern=r"PytorchStreamWriter failed writing file",
            sample="RuntimeError: [enforce fail at inline_container.cc:471] . PytorchStreamWriter failed writing "
            "file data/3: file write failed",
        ),
        Signature(
            words="unexpected+pos",
            pattern=r"enforce fail at inline_container\.cc:\d{1,6}\] ?\. ?unexpected pos \d{1,20} vs \d{1,20}",
            sample="RuntimeError: [enforce fail at inline_container.cc:337] . unexpected pos 1141573248 vs 1141573140",
        ),
    ),
)

CHECKPOINT_NOT_FOUND = Rule(
    id="checkpoint-not-found",
    stage=Stage.RUN,
    title="there is no DeepSpeed checkpoint in this folder{path_hint}",
    fix="give the folder that holds `latest` and global_step*, not one inside of it and not a single file; a "
    "checkpoint of weights only (save_only_model) has no optimizer state and cannot be resumed from",
    steps=(step("python -m dsdoctor checkpoint {path|CKPT}"),),
    manual="""The folder that was named holds no checkpoint of DeepSpeed.

DeepSpeed looks for the file `latest`, which names a folder such as global_step500; Hugging Face looks for
global_step* in checkpoint-N. With save_only_model, or where only rank 0 kept its disk, there is none. load_checkpoint
itself only warns and returns (None, None), so a run may begin anew without a word.

Why it matters: The run does not resume where it stopped.""",
    signatures=(
        Signature(
            words="find+valid+checkpoint valid+checkpoint+output",
            pattern=r"ValueError: (?:Can't find a valid checkpoint at (?P<path>\S{1,200})|No valid checkpoint "
            r"found in output directory "
            r"\((?P<path2>[^)]{1,200})\))",
            sample="ValueError: Can't find a valid checkpoint at out/checkpoint-400",
        ),
        Signature(
            words="failed+resume+checkpoint",
            pattern=r"\[deepspeed\] failed to resume from checkpoint (?P<path>\S{1,200})",
            sample="ValueError: [deepspeed] failed to resume from checkpoint out/checkpoint-400",
        ),
        Signature(
            words="notadirectoryerror",
            pattern=r"^NotADirectoryError: \[Errno 20\] Not a directory: "
            r"'(?P<path>[^']{1,200}\.(?:pth?|ckpt|bin|safetensors))",
            title="a single file was given where DeepSpeed resumes from its checkpoint folder (directory): {path}",
            steps=(),
            sample="NotADirectoryError: [Errno 20] Not a directory: 'work_dirs/sa2va_4b/iter_5000.pth'",
        ),
        Signature(
            words="latest+unable",
            pattern=r"Unable to find 'latest' file at (?P<path>\S{1,200})|Error: Directory "
            r"'(?P<path2>[^']{1,200}global_step\d{1,12})' doesn't exist",
            sample="ValueError: Unable to find 'latest' file at out/latest",
        ),
        Signature(
            words="typeerror+nonetype attributeerror+nonetype nonetype",
            pattern=r"^(?:Type|Attribute)Error: 'NoneType' object (?:is not (?:subscriptable|iterable)|has no "
            r"attribute '(?:get|items|keys)')",
            after=r"Unable to find latest file at",
            title="no checkpoint was found: load_checkpoint gave None for path and state, and the script uses them",
            sample="[WARNING] [engine.py:4437:load_checkpoint] Unable to find latest file at /data/ckpt/latest, "
            "if trying to load\n"
            "TypeError: 'NoneType' object is not subscriptable",
        ),
        Signature(
            words="latest+unable",
            pattern=r"Unable to find latest file at (?P<path>\S{1,200}?),? (?:if|$)",
            tier=Tier.PROBE,
            stands=True,
            persists=True,
            title="load_checkpoint found no checkpoint{path_hint} (no file latest) and loaded nothing: the run began "
            "anew, which is right at "
            "a first start only",
            fix="if the run was to resume, give the folder that holds `latest` and global_step*, the same on every "
            "node; let the script stop "
            "where load_checkpoint returns (None, None)",
            sample="[WARNING] [engine.py:4437:load_checkpoint] Unable to find latest file at /data/ckpt/latest, "
            "if trying to load latest checkpoint please ensure this file exists",
        ),
    ),
)

CHECKPOINT_TAG_DIFFERS = Rule(
    id="checkpoint-tag-differs",
    stage=Stage.RUN,
    title="the ranks gave different tags to save_checkpoint{tag_hint}",
    fix="make the tag from the step alone, without clock, rank or random parts; checkpoint.tag_validation says "
    "whether it is checked",
    manual="""save_checkpoint was called with another tag on each rank.

Each rank would write into a folder of its own, and no folder would hold a whole checkpoint.

Why it matters: The checkpoint could not be loaded.""",
    signatures=(
        Signature(
            words="consistent+tag",
            pattern=r"The checkpoint tag name '(?P<tag>[^']{1,120})' is not consistent across all ranks",
            sample="AssertionError: [rank=0] The checkpoint tag name 'step-1795343865' is not consistent across "
            "all ranks.",
        ),
    ),
)

CHECKPOINT_NOT_GATHERED = Rule(
    id="checkpoint-not-gathered",
    stage=Stage.RUN,
    title="the model is to be saved in 16 bit, and gathering under ZeRO-3 is switched off",
    fix='set "stage3_gather_16bit_weights_on_model_save": true in zero_optimization (accelerate: '
    "zero3_save_16bit_model), or save a "
    "DeepSpeed checkpoint and convert it with zero_to_fp32.py",
    manual="""Under ZeRO-3 no rank holds the whole weights, and the configuration forbids gathering them for saving.

Gathering needs room for the whole model on rank 0.

Why it matters: The model is not saved.""",
    signatures=(
        Signature(
            words="16bit+model+weights",
            pattern=r"Cannot get 16bit model weights because `stage3_gather_(?:16bit|fp16)_weights_on_model_save`",
            sample="ValueError: Cannot get 16bit model weights because "
            "`stage3_gather_16bit_weights_on_model_save` in DeepSpeed config is False.",
        ),
    ),
)

RULES = (
    CHECKPOINT_SHARD_MISSING,
    CHECKPOINT_DAMAGED,
    CHECKPOINT_NOT_WRITTEN,
    CHECKPOINT_NOT_FOUND,
    CHECKPOINT_TAG_DIFFERS,
    CHECKPOINT_NOT_GATHERED,
)
