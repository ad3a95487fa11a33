"""Rules of Hugging Face: the Trainer's arguments against the DeepSpeed configuration, loading of models, the hub."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

HF_CONFIG_MISMATCH = Rule(
    id="hf-config-mismatch",
    stage=Stage.RUN,
    title="the DeepSpeed configuration and the TrainingArguments differ (a mismatch): {key|a key} is {here|one "
    "value} there, {argument|the argument} is {there|another} here",
    fix='set these keys to "auto" in the DeepSpeed configuration, and the Trainer fills in the '
    "TrainingArguments' values; or "
    "make them equal",
    manual="""A value stands both in the DeepSpeed configuration and in the TrainingArguments, and the two differ.

The Trainer compares batch sizes, learning rate, weight decay, gradient clipping, warm-up, fp16 and bf16. Each line of
the message names a key of DeepSpeed (ds) and the argument of Hugging Face (hf).

Why it matters: The Trainer refuses to start.""",
    signatures=(
        Signature(
            words="ds+hf+vs",
            pattern=r"^- ds (?P<key>[\w.]{1,80})=(?P<here>\S{1,60}) vs hf (?P<argument>[\w. "
            r"()/|-]{1,80})=(?P<there>\S{1,60})",
            sample="- ds bf16.enabled=True vs hf bf16=False",
        ),
    ),
)

HF_MODEL_UNDER_ZERO3 = Rule(
    id="hf-model-under-zero3",
    stage=Stage.RUN,
    title="device_map and low_cpu_mem_usage do not go together with ZeRO-3, which divides the model itself",
    fix="leave device_map (and low_cpu_mem_usage) out of from_pretrained when ZeRO-3 is on",
    manual="""The model is loaded with a device_map while ZeRO-3 is on.

ZeRO-3 divides each parameter among the ranks while the model is made. device_map="auto" places whole layers on
devices; both at once is not possible. Quantized models are loaded with a device_map behind the scenes.

Why it matters: from_pretrained stops, on every rank.""",
    signatures=(
        Signature(
            words="initialized+zero+configured",
            pattern=r"ValueError: Model was not initialized with `Zero-3` despite being configured for DeepSpeed Zero-3",
            title="the model was made before the TrainingArguments, so it was not made under ZeRO-3 "
            "(deepspeed.zero.Init)",
            fix="create the TrainingArguments (with --deepspeed) first, then the model by from_pretrained or "
            "from_config; start the script with a launcher",
            sample="ValueError: Model was not initialized with `Zero-3` despite being configured for DeepSpeed "
            "Zero-3. Please re-initialize your model via `Model.from_pretrained(...)`",
        ),
        Signature(
            words="device_map+requires device_map+zero",
            pattern=r"Passing along a `device_map` requires `low_cpu_mem_usage=True`|DeepSpeed Zero-3 is not "
            r"compatible with "
            r"(?:`low_cpu_mem_usage=True` or with passing a `device_map`|passing a `device_map`)",
            sample="ValueError: Passing along a `device_map` requires `low_cpu_mem_usage=True`",
        ),
    ),
)

HF_QUANTIZED_UNDER_ZERO3 = Rule(
    id="hf-quantized-under-zero3",
    stage=Stage.RUN,
    title="the weights are quantized (4-bit or 8-bit integers), and ZeRO-3 asks for gradients of them",
    fix="use ZeRO-2 for QLoRA, or load the model without load_in_4bit and load_in_8bit; ZeRO-3 with 4-bit needs "
    "newer transformers, accelerate and bitsandbytes, and bnb_4bit_quant_storage set to the training's dtype",
    steps=(step("python -m pip install -U transformers accelerate bitsandbytes peft"),),
    manual="""A model with quantized weights was made under ZeRO-3.

Quantized weights are stored as integers, and integers cannot have gradients. ZeRO-3 marks every parameter that it
takes over, unless it is stored in a floating type (bnb_4bit_quant_storage).

Why it matters: The model cannot be made.""",
    signatures=(
        Signature(
            words="compress_statistics quant_state bnb_quantized quant_type quant_storage",
            pattern=r"^AttributeError: '(?:Parameter|Tensor|NoneType)' object has no attribute "
            r"'(?:compress_statistics|quant_state|bnb_quantized|quant_type|quant_storage)'",
            title="the weights are quantized by bitsandbytes, and ZeRO-3 or a wrapper has replaced its parameters by plain ones",
            sample="AttributeError: 'Parameter' object has no attribute 'compress_statistics'",
        ),
        Signature(
            words="floating+complex+gradients",
            pattern=r"[Oo]nly Tensors of floating point(?: and complex)? dtype can require gradients",
            after=r"deepspeed[/\\]runtime[/\\]zero|bitsandbytes",
            sample='  File "/venv/deepspeed/runtime/zero/partition_parameters.py", line 1037, in _zero_init_param\n'
            "RuntimeError: Only Tensors of floating point and complex dtype can require gradients",
        ),
        Signature(
            words="mat1+mat2+shapes",
            pattern=r"^RuntimeError: mat1 and mat2 shapes cannot be multiplied \((?P<one>\d{1,9}x\d{1,9}) and "
            r"(?P<two>\d{5,12}x1|1x\d{5,12})\)",
            title="a weight that is still packed in 4 bit (shape {two}) is multiplied as if it were a plain one",
            fix="the layer was not replaced by bitsandbytes' Linear4bit, or its weight was cast or gathered by ZeRO-3: "
            "use ZeRO-2 for QLoRA, or bnb_4bit_quant_storage, and do not cast the model",
            sample="RuntimeError: mat1 and mat2 shapes cannot be multiplied (2048x4096 and 1x8388608)",
        ),
    ),
)

HF_HUB_UNREACHABLE = Rule(
    id="hf-hub-unreachable",
    stage=Stage.RUN,
    title="the model is not in the local cache, and the Hugging Face hub is switched off or out of reach",
    fix="download it where there is a network, and set HF_HOME to that cache on every node; unset HF_HUB_OFFLINE "
    "if the network is there",
    steps=(step("unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE"), instead("export HF_HOME=/shared/cache/huggingface")),
    explained_by=("certificate-out-of-date",),
    manual="""A file of the model or data set is wanted from the Hugging Face hub, and the hub does not answer.

HF_HUB_OFFLINE=1 (or TRANSFORMERS_OFFLINE=1) forbids asking; compute nodes often have no way out. A wrong name of a
local folder is taken for a name on the hub, too.

Why it matters: The rank that needs the file ends, and the others wait for it.""",
    signatures=(
        Signature(
            words="huggingface+connect couldn+huggingface",
            pattern=r"OSError: We couldn't connect to '(?:https://)?\S{1,80}' to load (?:the|this) files?",
            sample="OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't "
            "find them in the cached files.",
        ),
        Signature(
            words="huggingface+max huggingface+timed hf+max",
            pattern=r"host='(?P<name>(?:cdn-lfs\S{0,30}\.|\w{1,20}\.)?(?:huggingface\.co|hf\.co))', port=443\): "
            r"(?:Max retries exceeded(?!.{0,400}(?:SSLError|ProxyError))"
            r"|Read timed out)",
            tier=Tier.GENERIC,
            title="the Hugging Face hub ({name}) cannot be reached from here",
            sample="requests.exceptions.ConnectionError: (MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', "
            "port=443): Max retries exceeded with url: "
            "/gpt2/resolve/main/config.json",
        ),
        Signature(
            words="huggingface+sslerror huggingface+certificate_verify_failed hf+sslerror",
            pattern=r"host='(?P<name>[\w.-]{0,40}(?:huggingface\.co|hf\.co))', port=443\): Max retries "
            r"exceeded.{0,300}SSLError",
            title="the certificate of the Hugging Face hub ({name}) is not accepted: often a firewall's own stands in "
            "between",
            fix="name your site's certificate for Python (REQUESTS_CA_BUNDLE, SSL_CERT_FILE), or download the model "
            "elsewhere and set HF_HOME to that cache",
            steps=(step("export REQUESTS_CA_BUNDLE=/path/to/site-ca.pem SSL_CERT_FILE=/path/to/site-ca.pem"),),
            sample="requests.exceptions.SSLError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries "
            "exceeded with url: /api/models/gpt2 (Caused by "
            "SSLError(SSLCertVerificationError(1, 'certificate verify failed')))",
        ),
        Signature(
            words="huggingface+proxyerror hf+proxyerror",
            pattern=r"host='(?P<name>[\w.-]{0,40}(?:huggingface\.co|hf\.co))', port=443\): Max retries "
            r"exceeded.{0,300}ProxyError",
            title="the proxy does not let this machine through to the Hugging Face hub ({name})",
            fix="correct https_proxy, or download the model elsewhere and set HF_HOME to that cache",
            steps=(step("env | grep -i proxy"),),
            sample="requests.exceptions.ProxyError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries "
            "exceeded with url: /gpt2 (Caused by "
            "ProxyError('Cannot connect to proxy.'))",
        ),
        Signature(
            words="huggingface+429",
            pattern=r"(?:429 Client Error|HTTP (?:status )?429).{0,120}huggingface\.co",
            title="the Hugging Face hub answers 429, too many requests: all ranks ask it at once",
            fix="download the model or data set once (hf download), log in, and let the ranks read the cache: "
            "HF_HUB_OFFLINE=1",
            steps=(step("hf download NAME"), step("export HF_HUB_OFFLINE=1")),
            sample="huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: "
            "https://huggingface.co/api/datasets/x",
        ),
        Signature(
            words="localentrynotfounderror offlinemodeisenabled",
            pattern=r"^(?:[\w.]{1,80}\.)?(?:LocalEntryNotFoundError|OfflineModeIsEnabled): ",
            tier=Tier.GENERIC,
            sample="huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot "
            "folder for the specified revision on the local disk and outgoing traffic has been disabled.",
        ),
    ),
)

HF_HUB_REFUSED = Rule(
    id="hf-hub-refused",
    stage=Stage.RUN,
    title="the Hugging Face hub refuses {name|the model}: it is gated, private, or its name is wrong",
    fix="accept the licence on the model's page, and log in on the machine where the ranks run; or correct the name",
    steps=(step("hf auth login"), instead("huggingface-cli login")),
    manual="""The hub answers that this user may not have the files, or that there is no such repository.

Gated models need a licence accepted on their page and a token (HF_TOKEN) on every node. A local folder that does not
exist is taken for a name on the hub.

Why it matters: No rank can load the model.""",
    signatures=(
        Signature(
            words="gatedrepoerror gated+repo",
            pattern=r"^(?:[\w.]{1,80}\.)?GatedRepoError: |You are trying to access a gated repo",
            title="the model is gated: this user has not been given access",
            sample="OSError: You are trying to access a gated repo.",
        ),
        Signature(
            words="repositorynotfounderror revisionnotfounderror entrynotfounderror",
            pattern=r"^(?:[\w.]{1,80}\.)?(?:Repository|Revision|RemoteEntry|Entry)NotFoundError: (?P<status>40[134] "
            r"Client Error)?",
            title="the Hugging Face hub has no such repository, revision or file, or does not show it to this user "
            "(not logged in)",
            tier=Tier.GENERIC,
            sample="huggingface_hub.utils._errors.RepositoryNotFoundError: 401 Client Error. (Request ID: Root=1-65)",
        ),
        Signature(
            words="identifier+local+folder+valid",
            pattern=r"OSError: (?P<name>\S{1,120}) is not a local folder and is not a valid model identifier",
            sample="OSError: ./outputs/merged is not a local folder and is not a valid model identifier listed "
            "on 'https://huggingface.co/models'",
        ),
    ),
)

HF_MODEL_TYPE_UNKNOWN = Rule(
    id="hf-model-type-unknown",
    stage=Stage.RUN,
    title="this transformers is older than the model: it does not know {name|its type}",
    fix="upgrade transformers (and accelerate with it)",
    steps=(step("python -m pip install -U transformers accelerate"),),
    manual="""The model's config names a type that the installed transformers does not know.

Why it matters: The model cannot be loaded.""",
    signatures=(
        Signature(
            words="recognize+architecture",
            pattern=r"has model type `(?P<name>[\w.-]{1,60})` but Transformers does not recognize this architecture",
            sample="ValueError: The checkpoint you are trying to load has model type `qwen3_next` but "
            "Transformers does not recognize this architecture.",
        ),
        Signature(
            words="keyerror",
            pattern=r"^KeyError: '(?P<name>[a-z0-9_-]{2,40})'",
            after=r"configuration_auto\.py",
            tier=Tier.GENERIC,
            sample='  File "/venv/transformers/models/auto/configuration_auto.py", line 738, in __getitem__\n'
            "KeyError: 'qwen2'",
        ),
    ),
)

GPU_INDEX_OUT_OF_RANGE = Rule(
    id="gpu-index-out-of-range",
    stage=Stage.RUN,
    title="an index is out of range on the GPU: a token id, a label or a position is outside of its table",
    fix="compare the largest token id with the model's vocabulary (resize_token_embeddings after adding tokens), "
    "the labels with the number of classes (or -100), and the length with the number of positions; run it once "
    "on the CPU to see which",
    steps=(step("CUDA_LAUNCH_BLOCKING=1 python SCRIPT.py", note="shows the right line"),),
    manual="""A kernel on the GPU was given an index that lies outside of its table.

Most often the tokenizer has more tokens than the model's embedding, a label is outside of the classes, or a sequence
is longer than the positions. The GPU works behind the program, so the traceback shows a later line; on the CPU the
same batch raises IndexError at the right one.

Why it matters: After a device-side assert the process cannot use the GPU any more.""",
    signatures=(
        Signature(
            words="srcindex bounds+index n_classes idx_dim nll_loss",
            pattern=r"\.cu:\d+: .{0,200}Assertion `.{0,80}(?:srcIndex < srcSelectDimSize|index out of bounds|n_classes"
            r"|idx_dim >= 0).{0,60}failed",
            sample="../aten/src/ATen/native/cuda/Indexing.cu:1141: indexSelectLargeIndex: block: [682,0,0], "
            "thread: [56,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
        ),
        Signature(
            words="self+index+range",
            pattern=r"^IndexError: index out of range in self",
            title="an index is out of range in an embedding: a token id or a position is outside of its table",
            fix="it was raised on the CPU, so the traceback is exact: the embedding in its last frames is the one. Compare its "
            "num_embeddings with the largest index that it was given: the tokenizer's ids (resize_token_embeddings after "
            "adding tokens), or the length with the number of positions (max_position_embeddings)",
            steps=(
                step("python -m pdb -c continue SCRIPT.py", note="at its end: up, then p input.max(), weight.shape"),
            ),
            sample="IndexError: index out of range in self",
        ),
    ),
)

GPU_ASSERT = Rule(
    id="gpu-assert",
    stage=Stage.RUN,
    title="a check inside a GPU kernel failed (device-side assert), most often of an index: token id, label or "
    "position",
    fix="look for the kernel's own line with \"Assertion\" further up in every rank's log; else run the same "
    "batch on the CPU, or with CUDA_LAUNCH_BLOCKING=1, and the traceback shows the right line",
    steps=(step("CUDA_LAUNCH_BLOCKING=1 python SCRIPT.py"),),
    explained_by=("gpu-index-out-of-range", "image-tokens-differ", "sampling-from-nan"),
    manual="""A GPU kernel found a value that it cannot work with, and stopped.

The kernel prints a line with "Assertion ... failed" that says what it checked. The GPU works behind the program, so the
traceback shows a later line.

Why it matters: The process cannot use the GPU any more; every call after it fails with the same message.""",
    signatures=(
        Signature(
            words="assert+device+side",
            pattern=r"^(?:[\w.]{1,60}\.)?\w{1,40}Error: CUDA error: device-side assert triggered",
            tier=Tier.GENERIC,
            sample="RuntimeError: CUDA error: device-side assert triggered",
        ),
    ),
)

RULES = (
    GPU_ASSERT,
    HF_CONFIG_MISMATCH,
    HF_MODEL_UNDER_ZERO3,
    HF_QUANTIZED_UNDER_ZERO3,
    HF_HUB_UNREACHABLE,
    HF_HUB_REFUSED,
    HF_MODEL_TYPE_UNKNOWN,
    GPU_INDEX_OUT_OF_RANGE,
)
