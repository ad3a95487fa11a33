"""Rules of scripts that carry parts of another release with them: old trainers, save hooks, files that hide a package."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

PACKAGE_ASKED_FOR = Rule(
    id="package-asked-for",
    stage=Stage.RUN,
    title="a package asks for {module}, which is not installed (or too old)",
    fix="install it into the environment that runs the script: pip install {module}",
    steps=(step("python -m pip install -U {module}"),),
    explained_by=("python-dep-missing", "package-version-bound", "flash-attention-unavailable"),
    manual="""A package needs another one for what it was asked to do, and says how it is installed.

Optional parts (bitsandbytes, sentencepiece, flash-attn, ...) are not installed along with the package.

Why it matters: The script stops at the import, or at the first use.""",
    signatures=(
        Signature(
            words="importerror+pip+install packagenotfounderror+pip+install valueerror+pip+install "
            "runtimeerror+pip+install",
            pattern=r"^(?:ImportError|RuntimeError|ValueError|ModuleNotFoundError)(?!.{0,200}(?:compil|[Cc]orrupt)): "
            r"[^\n]{0,300}?\bpip3? install (?:-U |--upgrade )?[`'\"]?(?P<module>(?!-)[A-Za-z][\w.-]{1,60})",
            unless=r"[Nn]inja is required|bitsandbytes|Using the `Trainer`|[Dd]eep[Ss]peed is not installed|is "
            r"required for "
            r"a normal functioning",
            tier=Tier.GENERIC,
            sample="ImportError: Unsloth: Please install unsloth_zoo via `pip install unsloth_zoo`",
        ),
    ),
)

TRAINER_OF_OTHER_RELEASE = Rule(
    id="trainer-of-other-release",
    stage=Stage.RUN,
    title="a Trainer that the script brings along was written for another transformers: it has no {name}",
    fix="take the transformers that the script was written for (its requirements.txt), or upgrade the script; "
    "is_deepspeed_enabled, is_fsdp_enabled and accelerator came with transformers 4.30",
    steps=(step("python -m pip show transformers accelerate"), instead("python -m pip install transformers==4.30.2")),
    explained_by=("known-regression",),
    manual="""A script's own trainer.py is a copy of some transformers release, and the parent class is of another one.

Why it matters: The first step or the first save of the Trainer fails.""",
    signatures=(
        Signature(
            words="attribute+is_deepspeed_enabled attribute+is_fsdp_enabled attribute+is_fsdp_xla_enabled "
            "attribute+_train_batch_size attribute+is_in_train attribute+sharded_ddp attribute+fsdp",
            pattern=r"^AttributeError: '(?P<class>\w{0,60}Trainer)' object has no attribute "
            r"'(?P<name>is_deepspeed_enabled|is_fsdp_enabled|is_fsdp_xla_enabled|_train_batch_size|is_in_train"
            r"|sharded_ddp|fsdp)'",
            sample="AttributeError: 'Seq2SeqTrainer' object has no attribute 'is_deepspeed_enabled'",
        ),
        Signature(
            words="attribute+config attribute+hidden_size",
            pattern=r"^AttributeError: '(?P<class>\w{1,80})' object has no attribute '(?P<name>config|hidden_size)'",
            after=r"trainer_config_finalize|_prepare_deepspeed",
            tier=Tier.GENERIC,
            title="`auto` in the DeepSpeed config needs the model's hidden_size, and {class} has no {name}",
            fix="write reduce_bucket_size, stage3_prefetch_bucket_size and stage3_param_persistence_threshold as "
            "numbers "
            'instead of "auto", or give the model a config with hidden_size',
            steps=(step("python -m dsdoctor check"),),
            sample='  File "/venv/lib/python3.8/site-packages/transformers/deepspeed.py", line 267, in '
            "trainer_config_finalize\nAttributeError: 'OntoProteinPreTrainedModel' object has no attribute 'config'",
        ),
        Signature(
            words="setter+property setter+attribute set+attribute+can",
            pattern=r"^AttributeError: (?:property '(?P<name>\w{1,60})' of '(?P<class>\w{1,80})' object has no "
            r"setter|can't "
            r"set attribute '(?P<name2>\w{1,60})')",
            tier=Tier.GENERIC,
            title="{name} cannot be set: it became a read-only property in the installed release",
            fix="take the release that the script was written for, or remove the assignment (a tokenizer's vocab_size "
            "follows from add_tokens; the model's from resize_token_embeddings)",
            sample="AttributeError: property 'vocab_size' of 'PreTrainedTokenizerFast' object has no setter",
        ),
        Signature(
            words="invalid+dict+deepspeed",
            pattern=r"ValueError: --(?P<name>deepspeed|\w{1,40}_kwargs|accelerator_config|\w{1,40}_config): invalid "
            r"dict value: "
            r"'(?P<class>[^']{1,160})'",
            title="--{name} was given {class}, and this version takes it as a dictionary only (invalid dict value)",
            fix="write JSON in its place ('{...}'), put the path into the YAML file instead of the command line, or "
            "take "
            "the transformers that the framework pins (in LLaMA-Factory its requirements)",
            steps=(step("python -m pip show transformers"),),
            sample="ValueError: --deepspeed: invalid dict value: 'examples/deepspeed/ds_z3_config.json'",
        ),
        Signature(
            words="unexpected+save+model",
            pattern=r"^ValueError: [Uu]nexpected save model: <class '(?P<class>[\w.]{1,100}DeepSpeedEngine)'>",
            title="the script's save hook meets the {class}, and knows the bare models only",
            fix="unwrap first: accelerator.unwrap_model(model) before the isinstance tests of save_model_hook; newer "
            "scripts of diffusers do so",
            steps=(step("python -m pip install -U diffusers accelerate"),),
            sample="ValueError: unexpected save model: <class 'deepspeed.runtime.engine.DeepSpeedEngine'>",
        ),
        Signature(
            words="attribute+element_size attribute+itemsize",
            pattern=r"^AttributeError: 'torch\.dtype' object has no attribute '(?P<name>element_size|itemsize|to_real)"
            r"'",
            title="torch is older than this transformers or accelerate needs: torch.dtype has no {name} there",
            fix="upgrade torch (2.2 or newer; its GPU build for the same CUDA), or take an older transformers",
            steps=(step("python -m pip install -U torch"), instead("python -m pip show torch transformers")),
            sample="AttributeError: 'torch.dtype' object has no attribute 'element_size'",
        ),
    ),
)

FILE_WITHOUT_KEY = Rule(
    id="file-without-key",
    stage=Stage.RUN,
    title="the loaded file has no entry {key}: it is of another kind than the script expects",
    fix="print the keys of the file: zero_to_fp32.py and save_16bit_model write the bare weights (no 'state_dict', no "
    "'module'), Lightning 'state_dict', DeepSpeed's model_states 'module'; peft wants the names of an adapter "
    "(base_model.model...)",
    steps=(
        step(
            "python -c 'import sys, torch; print(list(torch.load(sys.argv[1], map_location=sys.argv[2]))[:9])' FILE cpu"
        ),
    ),
    manual="""A script reads one entry of a checkpoint file by its name, and the file does not have it.

The programs that write checkpoints lay them out differently.

Why it matters: Nothing of the file is loaded.""",
    signatures=(
        Signature(
            words="keyerror+state_dict keyerror+model_state_dict keyerror+module keyerror+base_model "
            "keyerror+optimizer keyerror+epoch keyerror+global_step keyerror+lr_scheduler keyerror+model",
            pattern=r"^KeyError: '(?P<key>state_dict|model_state_dict|module|optimizer|epoch|global_step|lr_scheduler)"
            r"'",
            after=r"torch\.load|load_checkpoint|load_state_dict|safe_load|load_file|ckpt|checkpoint|\bpeft\b",
            tier=Tier.GENERIC,
            sample='    state_dict = torch.load(opts.ckpt, map_location="cpu")["state_dict"]\nKeyError: \'state_dict\'',
        ),
        Signature(
            words="keyerror+base_model",
            pattern=r"^KeyError: '(?P<key>base_model\.model\.[\w.]{1,120})'",
            title="the file has no {key}: weights under peft's names are expected, and the file holds others (the "
            "whole "
            "model, or the adapter without base_model.model)",
            fix="load an adapter that was saved by peft (adapter_model.safetensors) with PeftModel.from_pretrained, "
            "and "
            "whole weights (zero_to_fp32.py's) into the bare model before get_peft_model",
            steps=(step("ls -l CKPT"),),
            sample="KeyError: 'base_model.model.model.embed_tokens.weight'",
        ),
        Signature(
            words="parameter+buffer+named",
            pattern=r"^ValueError: (?P<class>\w{1,60})\(?\)? does not have a parameter or a buffer named "
            r"(?P<key>[\w.]{1,80})",
            title="the file has weights {key} that the layer {class} does not know: it was quantised in another way "
            "(GPTQ, AWQ, group size) or is of another model",
            fix="load it with the quantisation that it was written with (quantization_config of its config.json, the "
            "right package: gptqmodel, auto-gptq, autoawq, bitsandbytes)",
            steps=(step("python -m pip list"),),
            sample="ValueError: Autograd4bitQuantLinear() does not have a parameter or a buffer named qzeros.",
        ),
    ),
)

RULES = (PACKAGE_ASKED_FOR, TRAINER_OF_OTHER_RELEASE, FILE_WITHOUT_KEY)
