"""Rules of checkpoints that are whole and do not fit: another world size, another model, refused by torch.load."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

CHECKPOINT_WEIGHTS_ONLY = Rule(
    id="checkpoint-weights-only",
    stage=Stage.RUN,
    title="torch.load refuses this file: it holds other things than tensors{global_hint}, and weights_only is "
    "True since torch 2.6",
    fix="if you trust the file, load it with weights_only=False: upgrade the library that calls torch.load "
    "(DeepSpeed, transformers, lightning), or allow the type with torch.serialization.add_safe_globals",
    steps=(
        step("python -m pip install -U deepspeed transformers"),
        instead(
            "export TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1", note="only for files that you trust: it runs code from them"
        ),
    ),
    manual="""Since torch 2.6 torch.load reads tensors and plain types only, unless its caller says weights_only=False.

DeepSpeed's checkpoints hold objects of its own (ZeroStageEnum, LossScaler), rng states hold numpy's. Newer releases
of the libraries say weights_only=False where they read their own files. A file with such objects can run code when it
is read.

Why it matters: A checkpoint that could be read with an older torch cannot be resumed from.""",
    signatures=(
        Signature(
            words="weights+load+failed",
            pattern=r"UnpicklingError: Weights only load failed",
            sample="_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so "
            "you have two options",
        ),
        Signature(
            words="weightsunpickler",
            pattern=r"WeightsUnpickler error: Unsupported (?:global: GLOBAL (?P<global>[\w.]{1,100})|operand|class)",
            tier=Tier.GENERIC,
            sample="WeightsUnpickler error: Unsupported global: GLOBAL "
            "deepspeed.runtime.zero.config.ZeroStageEnum was not an allowed global by default.",
        ),
    ),
)

CHECKPOINT_WORLD_SIZE = Rule(
    id="checkpoint-world-size",
    stage=Stage.RUN,
    title="the checkpoint was written with a data-parallel world size of {saved|another size}, and this run has "
    "{here|another}",
    fix="resume with the same number of ranks; or convert it to a universal checkpoint and set "
    "checkpoint.load_universal; or load the weights alone (load_optimizer_states=False)",
    steps=(
        step("python -m dsdoctor checkpoint CKPT --world N", note="says whether it loads with N ranks, and how"),
        step("python -m dsdoctor checkpoint CKPT --tag TAG --universal CKPT/TAG_universal"),
    ),
    manual="""Each rank of ZeRO saves its own part of the optimizer's states, so the number of ranks is part of
the checkpoint.

A universal checkpoint holds the states by parameter and can be loaded with any number of ranks. Weights alone can
always be loaded.

Why it matters: The run cannot be resumed on another number of GPUs without a conversion.""",
    signatures=(
        Signature(
            words="world+checkpoint+dp",
            pattern=r"The checkpoint being loaded used a DP world size of (?P<saved>\d{1,6}) but the current "
            r"world size is "
            r"(?P<here>\d{1,6})",
            sample="deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP "
            "world size of 2 but the current world size is 1. Automatic adjustment of ZeRO's optimizer state "
            "partitioning with a new world size is not currently supported.",
        ),
        Signature(
            words="_optim_states+expected",
            pattern=r"Expected (?P<saved>\d{1,6}) of '\*_optim_states\.pt' under '.{1,200}' but found "
            r"(?P<here>\d{1,6}) files",
            title="shards of the checkpoint are missing, or left over: {saved} optim_states files are wanted, "
            "{here} are there",
            fix="bring the shards of all nodes into one folder (each node saves its own, unless the folder is "
            "shared), and remove those of an older run",
            steps=(step("ls -l CKPT/TAG"),),
            sample="ValueError: Expected 8 of '*_optim_states.pt' under 'ckpt/global_step2' but found 4 files. "
            "Possibly due to an overwrite of an old checkpoint, or a checkpoint didn't get saved by one or more "
            "processes.",
        ),
    ),
)

CHECKPOINT_UNIVERSAL = Rule(
    id="checkpoint-universal",
    stage=Stage.RUN,
    title="checkpoint.load_universal is on, and this is no universal checkpoint{path_hint}",
    fix="convert it first, with the tag of the step; ds_to_universal writes latest_universal beside latest",
    steps=(step("python -m dsdoctor checkpoint CKPT --tag TAG --universal CKPT/TAG_universal"),),
    manual="""A universal checkpoint is wanted, and the folder has none, or the converter finds something missing.

ds_to_universal reads the shards of all ranks, and some information that Megatron-DeepSpeed saves
(universal_checkpoint_info).

Why it matters: Nothing is loaded, and no rank starts to train.""",
    signatures=(
        Signature(
            words="universal+checkpoint",
            pattern=r"Invalid for universal checkpoint: (?P<path>\S{1,200}) does not exist",
            sample="ValueError: Invalid for universal checkpoint: ckpt/latest_universal does not exist",
        ),
        Signature(
            words="optimizer+global+missing",
            pattern=r"AssertionError: (?P<path>\S{1,200}) containing optimizer global state is missing! Cannot proceed",
            title="load_universal is on, and the checkpoint has no {path}: it is not universal, or was converted in "
            "part",
            sample="AssertionError: ckpt/global_step10/zero/optimizer_state.pt containing optimizer global state is "
            "missing! Cannot proceed.",
        ),
        Signature(
            words="elastic+checkpointing+universal",
            pattern=r"NotImplementedError: ZeRO-3 elastic checkpointing is deprecated and unsupported",
            title="zero_optimization.elastic_checkpoint is on, and ZeRO-3 has no elastic checkpoints any more",
            fix="remove elastic_checkpoint from the configuration; to go on with another number of ranks convert "
            "the checkpoint into a universal one and set checkpoint.load_universal",
            sample="NotImplementedError: ZeRO-3 elastic checkpointing is deprecated and unsupported. Use Universal "
            "Checkpointing instead.",
        ),
        Signature(
            words="universal_checkpoint_info+required verify+required+missing",
            pattern=r"Required \S{1,60} state is missing in checkpoint\. Verify that client creates this state",
            title="the checkpoint lacks universal_checkpoint_info, which the client (Megatron-DeepSpeed) has to save",
            fix="convert with --inject_missing_state where the model has no tensor parallelism, or save that "
            "state in the client",
            sample="AssertionError: Required universal_checkpoint_info state is missing in checkpoint. Verify "
            "that client creates this state.",
        ),
    ),
)

CHECKPOINT_OTHER_MODEL = Rule(
    id="checkpoint-other-model",
    stage=Stage.RUN,
    title="the checkpoint does not fit the model{model_hint}: keys of its state_dict are missing, unexpected, or "
    "of another shape",
    fix="load it into the model that it was written from: same layers, same wrappers (LoRA, compile), same "
    "vocabulary. load_module_strict=False leaves the rest as it is",
    steps=(step("python -m dsdoctor checkpoint CKPT --model CONFIG.json", note="names what differs"),),
    manual="""load_state_dict found other names or shapes in the checkpoint than the model has.

A layer that was added since, a prefix of a wrapper (module., _orig_mod., base_model.model.), or other sizes. With LoRA
DeepSpeed may have saved the trainable parameters only (exclude_frozen_parameters), and refuses to load strictly.

Why it matters: Nothing of the checkpoint is loaded.""",
    signatures=(
        Signature(
            words="mismatch+size+copying",
            pattern=r"size mismatch for (?P<name>[\w.]{1,120}): copying a param with shape "
            r"torch\.Size\(\[0\]\)(?: from ?"
            r"(?:checkpoint, the shape in current model is torch\.Size\(\[[1-9])?|$)",
            title="the file holds empty placeholders (shape [0]): it was saved under ZeRO-3 without gathering "
            "the weights",
            fix="make whole weights from the DeepSpeed checkpoint with its zero_to_fp32.py; next time save with "
            "stage3_gather_16bit_weights_on_model_save: true or engine.save_16bit_model",
            steps=(
                step("python -m dsdoctor checkpoint CKPT --merge OUTPUT"),
                instead("python zero_to_fp32.py CKPT OUTPUT"),
            ),
            sample="size mismatch for model.decoder.layers.0.self_attn.k_proj.weight: copying a param with shape "
            "torch.Size([0]) from checkpoint, the shape in current model is torch.Size([2560, 2560]).",
        ),
        Signature(
            words="mismatch+size+copying",
            pattern=r"size mismatch for (?P<name>[\w.]{0,100}(?:embed_tokens|embed_in|embed_out|lm_head|wte|word_embed"
            r"dings|embeddings)[\w.]{0,60}): "
            r"copying a param with shape torch\.Size\(\[(?P<here>[1-9]\d{0,9}), .{0,60}the shape in current model is "
            r"torch\.Size\(\[(?!(?P=here),)(?P<there>[1-9]\d{0,9}),",
            title="the vocabulary differs: {name} has {here} rows in the checkpoint, and {there} in this model",
            fix="call model.resize_token_embeddings(len(tokenizer)) with the tokenizer of that training before the "
            "checkpoint or adapter is loaded",
            sample="size mismatch for base_model.model.lm_head.modules_to_save.default.weight: copying a param with "
            "shape torch.Size([32001, 4096]) "
            "from checkpoint, the shape in current model is torch.Size([32000, 4096]).",
        ),
        Signature(
            words="mismatch+size+copying",
            pattern=r"size mismatch for (?P<name>[\w.]{1,120}): copying a param with shape "
            r"torch\.Size\(\[(?P<here>[1-9][\d, ]{0,60}|)\]\) from "
            r"checkpoint, the shape in current model is torch\.Size\(\[(?P<there>[1-9][\d, ]{0,60}|)\]\)",
            tier=Tier.GENERIC,
            title="the checkpoint does not fit the model: {name} has the shape [{here|}] there, and [{there|}] here",
            fix="load it into a model of the same sizes and wrappers (rank r of LoRA, number of labels, heads, "
            "layers).",
            sample="size mismatch for classifier.weight: copying a param with shape torch.Size([2, 768]) from "
            "checkpoint, the shape in current model is "
            "torch.Size([3, 768]).",
        ),
        Signature(
            words="mismatch+size+copying",
            pattern=r"size mismatch for (?P<name>[\w.]{1,120}): copying a param with shape torch\.Size\((?:\[\d{1,9}, "
            r"[\d, ]{1,60}\]\) from checkpoint, the shape in current model is torch\.Size\(\[1\]\)|\[1\]\) from "
            r"checkpoint, the shape in current model is torch\.Size\(\[\d{1,9}, [\d, ]{1,60}\]\))",
            title="{name} is a placeholder of shape [1]: ZeRO-3 of an old DeepSpeed partitioned it, and plain weights "
            "meet the partition here",
            fix="load before deepspeed.initialize, or inside of deepspeed.zero.GatheredParameters; make whole weights "
            "of a ZeRO-3 checkpoint with its zero_to_fp32.py, and let Lightning load the whole folder of the "
            "checkpoint",
            steps=(
                step("python -m dsdoctor checkpoint CKPT --merge OUTPUT"),
                instead("python zero_to_fp32.py CKPT OUTPUT"),
            ),
            sample="size mismatch for layer.weight: copying a param with shape torch.Size([2, 32]) from checkpoint, "
            "the shape in current model is torch.Size([1]).",
        ),
        Signature(
            words="state_dict+loading",
            pattern=r"^RuntimeError: Error\(s\) in loading state_dict for (?P<model>Peft\w{1,60})",
            tier=Tier.GENERIC,
            unless=r"size mismatch for ",
            title="a LoRA (peft) checkpoint lacks the frozen weights (the missing keys), and it is loaded strictly{model_hint}",
            fix="load it with load_module_strict=False (newer transformers and accelerate do so for peft "
            "models), or load the adapter with peft itself",
            steps=(step("python -m pip install -U transformers accelerate peft"),),
            sample="RuntimeError: Error(s) in loading state_dict for PeftModelForCausalLM:",
        ),
        Signature(
            words="state_dict+missing+keys state_dict+missing+key unexpected+keys+state_dict unexpected+key+state_dict",
            pattern=r"^(?:Missing|Unexpected) key\(s\) in state_dict:",
            after=r"Error\(s\) in loading state_dict",
            tier=Tier.GENERIC,
            sample="RuntimeError: Error(s) in loading state_dict for Net:\nMissing key(s) in state_dict: "
            '"adapter.weight", "adapter.bias". ',
        ),
    ),
)

RULES = (
    CHECKPOINT_WEIGHTS_ONLY,
    CHECKPOINT_WORLD_SIZE,
    CHECKPOINT_UNIVERSAL,
    CHECKPOINT_OTHER_MODEL,
)
