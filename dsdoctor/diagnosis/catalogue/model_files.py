"""Rules of loading a model or a tokenizer: files that are not there, packages that it needs, code of its own, LoRA's targets."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

MODEL_FILES_MISSING = Rule(
    id="model-files-missing",
    stage=Stage.RUN,
    title="{path|the model's folder} has no {file|file of that kind}",
    fix="see what the folder holds: a path counts from the folder in which the ranks run, and must be there on every "
    "node. "
    "A checkpoint of DeepSpeed holds shards: make model.safetensors or pytorch_model.bin of it with its "
    "zero_to_fp32.py; save "
    "config and tokenizer beside the weights with save_pretrained",
    steps=(step("ls -l {path|MODEL}"), step("python zero_to_fp32.py CKPT OUTPUT")),
    manual="""from_pretrained was given a folder or a name, and a file that it needs is not there.

A folder needs config.json, the weights and the tokenizer's files. A checkpoint of the Trainer under ZeRO-3 may have the
weights in DeepSpeed's shards only (global_step*). A download that broke off leaves parts.

Why it matters: The model or the tokenizer cannot be loaded.""",
    signatures=(
        Signature(
            words="file+named+directory",
            pattern=r"OSError: Error no file named (?P<file>[\w.-]{1,60}).{0,200}? found in directory "
            r"(?P<path>[^\s,]{1,200}?)\.?$",
            title="{path} has no weights: no {file}, no model.safetensors, no pytorch_model.bin",
            sample="OSError: Error no file named pytorch_model.bin, model.safetensors, tf_model.h5, model.ckpt.index "
            "or "
            "flax_model.msgpack found in directory ./out/checkpoint-500.",
        ),
        Signature(
            words="appear+file+named appear+files+named",
            pattern=r"OSError: (?P<path>\S{1,200}) does not appear to have (?:a )?files? named "
            r"(?P<file>\S{1,160}?)\.? ",
            sample="OSError: ./sd-base does not appear to have a file named tokenizer/config.json. Checkout "
            "'https://huggingface.co/./sd-base/tree/main' for available files.",
        ),
        Signature(
            words="load+tokenizer+directory load+processor+directory load+configuration+directory load+model+directory "
            "load+feature+directory load+image+directory",
            pattern=r"OSError: (?:Can't|Unable to|Cannot) load (?:the )?(?P<file>tokenizer|config(?:uration)?|model|im"
            r"age processor"
            r"|feature extractor|processor)(?: of)? (?:for|from)? ?'(?P<path>[^']{1,200})'",
            title="the {file} cannot be loaded from {path}: its files are not there, or it is no name on the hub",
            sample="OSError: Can't load tokenizer for './out'. If you were trying to load it from "
            "'https://huggingface.co/models', make sure you don't have a local directory with the same name.",
        ),
        Signature(
            words="valid+json+looks",
            pattern=r"OSError: It looks like the config file at '(?P<path>[^']{1,200})' is not a valid JSON file",
            title="{path} is no valid JSON: it is empty, cut off, a git-lfs pointer or a page of HTML",
            fix="look at the file's first lines and fetch it again",
            steps=(step("head -c 300 {path}"),),
            sample="OSError: It looks like the config file at 'data/hunyuan/config.json' is not a valid JSON file.",
        ),
        Signature(
            words="processor+found+check",
            pattern=r"ValueError: (?P<file>Processor|Image ?[pP]rocessor|Video ?[pP]rocessor|Feature extractor) was "
            r"not "
            r"found, please check",
            title="the model's {file} cannot be loaded: preprocessor_config.json is missing beside the weights, or "
            "this transformers is too old or too new for it",
            fix="copy preprocessor_config.json, chat_template.json and the tokenizer's files from the original model "
            "beside the weights; install pillow, torchvision, qwen-vl-utils and the transformers that the model names",
            steps=(step("ls -l MODEL"), step("python -m pip show transformers torchvision pillow")),
            sample="ValueError: Processor was not found, please check and update your processor config.",
        ),
        Signature(
            words="cloned+git+lfs",
            pattern=r"You seem to have cloned a repository without having git-lfs installed",
            title="the weights are pointers of git-lfs: the repository was cloned without git-lfs",
            fix="install git-lfs and fetch the files",
            steps=(step("git lfs install"), step("git lfs pull")),
            sample="OSError: You seem to have cloned a repository without having git-lfs installed. Please install "
            "git-lfs and run `git lfs install` followed by `git lfs pull` in the folder you cloned.",
        ),
    ),
)

MODEL_PATH_WRONG = Rule(
    id="model-path-wrong",
    stage=Stage.RUN,
    title="{path} is taken for a name on the Hugging Face hub: the path of this folder does not exist here",
    fix="correct the path: it counts from the folder in which the ranks run, must be mounted in the container, and be "
    "there on "
    "every node",
    steps=(step("ls -ld {path}"),),
    manual="""from_pretrained takes what is no folder for a name on the hub, and this is no name either.

Why it matters: The model cannot be loaded. The hub and its token have nothing to do with it.""",
    signatures=(
        Signature(
            words="hfvalidationerror+repo hfvalidationerror+name",
            pattern=r"HFValidationError: (?:Repo id must (?:be in the form|use alphanumeric).{0,120}?|Cannot have "
            r".{1,40} in "
            r"repo_id.{0,20})'(?P<path>[./~\w][^']{0,199})'\.?(?: Use|$)",
            sample="huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
            "'namespace/repo_name': '/data/models/llama-7b'. Use `repo_type` argument if needed.",
        ),
        Signature(
            words="incorrect+path_or_model_id",
            pattern=r"OSError: Incorrect path_or_model_id: '(?P<path>[^']{1,200})'",
            sample="OSError: Incorrect path_or_model_id: '/data/models/llama-7b'. Please provide either the path to a "
            "local "
            "folder or the repo_id of a model on the Hub.",
        ),
    ),
)

MODEL_CODE_NOT_TRUSTED = Rule(
    id="model-code-not-trusted",
    stage=Stage.RUN,
    title="the model brings code of its own, and it was not allowed to run: trust_remote_code is not set",
    fix="read that code, then give trust_remote_code=True to from_pretrained (or --trust_remote_code True); or upgrade "
    "transformers, where newer releases have the model built in",
    steps=(step("python -m pip install -U transformers"),),
    manual="""The configuration of the model names Python files in its own repository, which would have to be executed.

Why it matters: The model is not loaded. Code from the hub can do whatever your account may do.""",
    signatures=(
        Signature(
            words="trust_remote_code+option trust_remote_code+argument requires+execute contains+custom+executed",
            pattern=r"ValueError: (?:Loading (?P<name>\S{1,160}) requires you to execute|The repository (?:for )?"
            r"(?P<name2>\S{1,160}) contains custom code which must be executed)",
            sample="ValueError: The repository for /models/x contains custom code which must be executed to correctly "
            "load "
            "the model. You can inspect the repository content at https://hf.co//models/x.",
        ),
    ),
)

TOKENIZER_PACKAGE_MISSING = Rule(
    id="tokenizer-package-missing",
    stage=Stage.RUN,
    title="the tokenizer needs the Python package {package}, and it is not installed",
    fix="install it into the environment that runs the ranks, and start Python again",
    steps=(step("python -m pip install sentencepiece protobuf tiktoken"),),
    manual="""Some tokenizers are read by a package of their own: sentencepiece, protobuf or tiktoken.

Why it matters: The tokenizer cannot be loaded.""",
    signatures=(
        Signature(
            words="requires+sentencepiece requires+protobuf requires+tiktoken requires+tokenizers requires+jieba",
            pattern=r"requires the (?P<package>SentencePiece|protobuf|tiktoken|tokenizers|jieba) library but it was "
            r"not found",
            sample="LlamaTokenizer requires the SentencePiece library but it was not found in your environment.",
        ),
        Signature(
            words="instantiate+tokenizer instantiate+backend",
            pattern=r"ValueError: (?:Cannot instantiate this tokenizer from a slow version|Couldn't instantiate the "
            r"backend "
            r"tokenizer)",
            title="the fast tokenizer cannot be made from the slow one: sentencepiece (or tiktoken) is not installed",
            sample="ValueError: Cannot instantiate this tokenizer from a slow version. If it's based on "
            "sentencepiece, make "
            "sure you have sentencepiece installed.",
        ),
    ),
)

PROTOBUF_TOO_NEW = Rule(
    id="protobuf-too-new",
    stage=Stage.RUN,
    title="a package was generated for an older protobuf than the installed one",
    fix="take protobuf 3.20, or upgrade the package whose _pb2.py stands in the traceback (tensorboard, wandb, onnx)",
    steps=(
        step("python -m pip install 'protobuf<=3.20.3'"),
        instead("export PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python", note="slower, and nothing is changed"),
    ),
    manual="""Code that an older protoc made cannot be used with protobuf 4 and newer.

Why it matters: Importing that package fails.""",
    signatures=(
        Signature(
            words="descriptors+created",
            pattern=r"TypeError: Descriptors cannot (?:not )?be created directly",
            sample="TypeError: Descriptors cannot be created directly.",
        ),
    ),
)

PAD_TOKEN_MISSING = Rule(
    id="pad-token-missing",
    stage=Stage.RUN,
    title="a batch is to be padded, and the tokenizer has no padding token (pad_token)",
    fix="set tokenizer.pad_token = tokenizer.eos_token before the data is made; a token that is added needs "
    "model.resize_token_embeddings",
    manual="""Texts of different length are filled up with a padding token, and this tokenizer has none.

GPT and Llama models have none of their own.

Why it matters: The first batch cannot be made.""",
    signatures=(
        Signature(
            words="pad_token+tokenizer padding+token+tokenizer handle+batch+padding",
            pattern=r"ValueError: (?:Asking to pad but the tokenizer does not have a padding token|Cannot handle "
            r"batch sizes > 1 "
            r"if no padding token is defined)",
            sample="ValueError: Asking to pad but the tokenizer does not have a padding token. Please select a token "
            "to use "
            "as `pad_token` `(tokenizer.pad_token = tokenizer.eos_token e.g.)`",
        ),
    ),
)

LORA_TARGETS_MISSING = Rule(
    id="lora-targets-missing",
    stage=Stage.RUN,
    title="LoRA's target modules are not in this model: {names|the names that target_modules has}",
    fix="name modules that the model has (print(model) shows them), or target_modules='all-linear'",
    manual="""peft looks for modules by the names in target_modules, and found none, or one of a kind that it
cannot adapt.

Each model names its layers in its own way: q_proj, query_key_value, Wqkv, c_attn, W_pack.

Why it matters: The adapter cannot be made.""",
    signatures=(
        Signature(
            words="target+modules+base",
            pattern=r"ValueError: (?:No modules were targeted|Target modules (?P<names>.{1,120}?) not found in the "
            r"base model)",
            sample="ValueError: Target modules {'q_proj', 'v_proj'} not found in the base model. Please check the "
            "target "
            "modules and try again.",
        ),
        Signature(
            words="target+module+supported",
            pattern=r"ValueError: Target module (?P<names>.{1,120}?) is not supported\.",
            title="LoRA cannot adapt this module: {names}",
            fix="leave it out of target_modules: LoRA adapts Linear, Embedding, Conv1d, Conv2d and Conv1D; under "
            "ZeRO-3 or "
            "quantization upgrade peft",
            steps=(step("python -m pip install -U peft"),),
            sample="ValueError: Target module Dropout(p=0.1, inplace=False) is not supported. Currently, only the "
            "following "
            "modules are supported: `torch.nn.Linear`.",
        ),
        Signature(
            words="specify+target_modules",
            pattern=r"ValueError: Please specify `target_modules` in `peft_config`",
            title="peft does not know this model: target_modules must be given",
            sample="ValueError: Please specify `target_modules` in `peft_config`",
        ),
    ),
)

MODEL_OF_ANOTHER_CLASS = Rule(
    id="model-of-another-class",
    stage=Stage.RUN,
    title="{auto|this class of transformers} cannot load such a model: its configuration is {config|of another kind}",
    fix="load it with the class that its model card names (AutoModelForImageTextToText for models with pictures, "
    "AutoModelForSeq2SeqLM for T5 and its like), or upgrade transformers where the card says that this class can",
    steps=(step("python -m pip install -U transformers"),),
    manual="""Each AutoModel class of transformers has a list of configurations, and this one is not in it.

A multimodal or an encoder-decoder model was asked for as a causal language model, or the installed release does not know the
pair yet.

Why it matters: The model is not loaded.""",
    signatures=(
        Signature(
            words="unrecognized+configuration+class",
            pattern=r"^ValueError: Unrecognized configuration class <class '[\w.]{0,160}?(?P<config>\w{1,80})'> for this kind of "
            r"\w{4,40}: (?P<auto>\w{4,60})",
            sample="ValueError: Unrecognized configuration class <class 'transformers.models.qwen2_vl."
            "configuration_qwen2_vl.Qwen2VLConfig'> for this kind of AutoModel: AutoModelForCausalLM.",
        ),
    ),
)

RULES = (
    MODEL_OF_ANOTHER_CLASS,
    MODEL_FILES_MISSING,
    MODEL_PATH_WRONG,
    MODEL_CODE_NOT_TRUSTED,
    TOKENIZER_PACKAGE_MISSING,
    PROTOBUF_TOO_NEW,
    PAD_TOKEN_MISSING,
    LORA_TARGETS_MISSING,
)
