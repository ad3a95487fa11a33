"""Rules of parts of DeepSpeed that check what they are given: TiledLinear, Muon, FPDT, low-level
interfaces to parameters. Each knows a family of messages of the installed DeepSpeed."""

from dsdoctor.diagnosis.models import Rule, Signature, Stage

TILED_LINEAR = Rule(
    id="tiled-linear",
    stage=Stage.RUN,
    title="deepspeed.zero.TiledLinear was given splits, inputs or weights that do not fit it ({what|see the check in the "
    "last frame})",
    fix="let in_splits and out_splits lie between 1 and the number of features; with input_is_already_split give as many parts as "
    "in_splits; copy_params_from takes a Linear of the same features, and a bias on both sides or on none",
    manual="""TiledLinear divides one Linear into tiles of in_splits times out_splits, so that ZeRO-3 gathers less at once.

Splits larger than the features, inputs that were split otherwise, or a Linear of other sizes to copy from do not fit.

Why it matters: The layer cannot be made, or its first forward fails.""",
    signatures=(
        Signature(
            words="splits",
            pattern=r"(?:Runtime|Assertion)Error: (?P<what>(?:in|out) splits must be in range|Col splits \d{1,6} does not"
            r" match input "
            r"splits \d{1,6})",
            sample="RuntimeError: in splits must be in range [1, in_features].",
        ),
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"zero[/\\]tiling\.py",
            sample='  File "/venv/deepspeed/runtime/zero/tiling.py", line 233, in copy_params_from\nAssertionError',
        ),
    ),
)

MUON_GROUPS = Rule(
    id="muon-groups",
    stage=Stage.RUN,
    title="the parameter groups for Muon are not as it wants them",
    fix='give every group "use_muon": True (matrices of hidden layers: lr, momentum, weight_decay) or False (embeddings, heads, '
    "biases: lr, betas, eps, weight_decay) and no other key; or let deepspeed.initialize make them: optimizer type Muon, and "
    "parameter.use_muon = True or False on each parameter",
    manual="""Muon updates matrices by itself and hands all other parameters to Adam, so each group says which of the two it is.

Groups without use_muon, or with the settings of another optimizer, are refused by assertions without words.

Why it matters: The optimizer cannot be made.""",
    signatures=(
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"zero[/\\]muon[/\\]\w{1,30}\.py|\"use_muon\" in group",
            sample='  File "/venv/deepspeed/runtime/zero/muon/original_muon.py", line 378, in __init__\n'
            '    assert "use_muon" in group\nAssertionError',
        ),
    ),
)

FPDT_INPUT = Rule(
    id="fpdt-input",
    stage=Stage.RUN,
    title="FPDT (attention in chunks, with offload) was given what it does not take",
    fix="give no attention mask (it is causal only), a sequence per GPU that the number of chunks divides, and keep its "
    "tensors where "
    "FPDT put them",
    manual="""FPDT works through long sequences in chunks, whose keys and values wait on the CPU.

It knows causal attention only, and its chunks must be of one size.

Why it matters: The first forward fails, by an assertion without words.""",
    signatures=(
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?(?: gpu_chunk \S{1,80} shound be on.{0,80})?$",
            after=r"sequence[/\\]fpdt_layer\.py",
            sample='  File "/venv/deepspeed/sequence/fpdt_layer.py", line 174, in forward\n    assert attention_mask is None\n'
            "AssertionError",
        ),
    ),
)

PARAMETER_ACCESS = Rule(
    id="parameter-access",
    stage=Stage.RUN,
    title="a parameter or its optimizer state is read or written through DeepSpeed's safe_* functions in a way that does "
    "not fit: {what}",
    fix="give safe_set_full_* a tensor of the whole parameter's size and safe_set_local_* one of this rank's part, for parameters "
    "that require gradients and belong to the engine's optimizer; call them on every rank",
    manual="""safe_get_full_fp32_param, safe_set_local_grad and their like reach what ZeRO has divided.

The full ones want the whole parameter, the local ones this rank's part, and a parameter that was never given to the engine has
neither.

Why it matters: The call fails on the ranks that come to it, and the others wait.""",
    signatures=(
        Signature(
            words="elements+match+number partitioned+copy+tensor parameter+group+unable+zero",
            pattern=r"(?:Assertion|Runtime)Error: {1,3}(?P<what>Number of elements do not match: \d{1,15} != \d{1,15}|The"
            r" parameter does not "
            r"contain the partitioned copy of the tensor|Unable to find ZeRO parameter group for \S{1,80})",
            sample="AssertionError:  Number of elements do not match: 1024 != 512",
        ),
    ),
)

LAUNCHER_FILES = Rule(
    id="launcher-files",
    stage=Stage.LAUNCH,
    title="the deepspeed launcher cannot start with these options: {what}",
    fix="--save_pid: remove the file of the last run in /tmp, or give another number; --enable_each_rank_log: a folder that can be "
    "written",
    manual="""The launcher checks its files before it starts a process.

Why it matters: No process of the training is started.""",
    signatures=(
        Signature(
            words="pid+file+exists rank+log+directory",
            pattern=r"(?:Assertion|Value)Error: (?P<what>pid file exists but shouldn't|unable to create directory"
            r" \S{1,160} for each rank log)",
            sample="AssertionError: pid file exists but shouldn't",
        ),
    ),
)

RULES = (TILED_LINEAR, MUON_GROUPS, FPDT_INPUT, PARAMETER_ACCESS, LAUNCHER_FILES)
