"""Rules of quantized models: bitsandbytes' own library, 4-bit weights under DeepSpeed, training without an adapter."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

BITSANDBYTES_UNLOADABLE = Rule(
    id="bitsandbytes-unloadable",
    stage=Stage.LOAD,
    title="bitsandbytes does not load its library for this CUDA{file_hint}",
    fix="upgrade bitsandbytes: newer wheels bring a library for each CUDA release; unset BNB_CUDA_VERSION, and see "
    "that torch is a "
    "build for CUDA and sees the GPU. DeepSpeed has nothing to do with it",
    steps=(
        step("python -m pip install -U bitsandbytes"),
        step("python -m bitsandbytes", note="shows what it finds"),
        step("unset BNB_CUDA_VERSION"),
    ),
    manual="""bitsandbytes looks for a library named after torch's CUDA release (libbitsandbytes_cuda124.so), or
finds libcudart not at all.

Old releases have none for newer CUDA, and fall back to their library for CPUs, which lacks most functions.

Why it matters: 4-bit and 8-bit models and optimizers (paged_adamw_8bit) cannot be used.""",
    signatures=(
        Signature(
            words="cuda+setup+failed",
            pattern=r"CUDA Setup failed despite (?:GPU|CUDA) being available",
            sample="CUDA Setup failed despite GPU being available. Please run the following command to get more "
            "information:",
        ),
        Signature(
            words="libbitsandbytes_cpu libbitsandbytes",
            pattern=r"(?P<file>libbitsandbytes_\w{1,40}\.(?:so|dll)): (?:undefined symbol|cannot open shared object)",
            sample="AttributeError: /venv/bitsandbytes/libbitsandbytes_cpu.so: undefined symbol: cget_col_row_stats",
        ),
        Signature(
            words="configured+cuda+binary find+bitsandbytes+binary",
            pattern=r"^RuntimeError: .{0,40}(?:Configured CUDA binary not found at|Could not find the bitsandbytes "
            r"CUDA binary at) "
            r"(?P<file>\S{1,160})",
            sample="RuntimeError: Configured CUDA binary not found at /venv/bitsandbytes/libbitsandbytes_cuda128.so",
        ),
        Signature(
            words="bitsandbytes+required bitsandbytes+requires bitsandbytes+latest",
            pattern=r"ImportError: (?:Using `?(?:load_in_8bit=True`?|bitsandbytes`? (?:4-bit|8-bit) quantization) "
            r"requires|The installed "
            r"version of bitsandbytes)",
            title="transformers asks for bitsandbytes (or a newer accelerate), and it is missing, too old or without "
            "GPU support",
            sample="ImportError: Using `bitsandbytes` 4-bit quantization requires the latest version of bitsandbytes: "
            "`pip install -U "
            "bitsandbytes`",
        ),
    ),
)

BITSANDBYTES_KERNEL_FAILED = Rule(
    id="bitsandbytes-kernel-failed",
    stage=Stage.RUN,
    title="bitsandbytes' own kernel failed ({why} in {file}), and it ends the process without a traceback",
    fix="an 8-bit optimizer (adamw_bnb_8bit, paged_adamw_8bit) does not go with ZeRO-3 or CPU offload: give "
    "optim: adamw_torch, or let the DeepSpeed config make the optimizer; for models upgrade bitsandbytes, and see that "
    "each rank uses its own GPU (torch.cuda.set_device, CUDA_VISIBLE_DEVICES)",
    steps=(step("python -m pip install -U bitsandbytes"), instead("python -m bitsandbytes")),
    manual="""bitsandbytes checks each kernel by itself, prints one line, and calls exit(1).

ZeRO-3 leaves parameters of 0 elements on a rank, and a kernel over nothing is an invalid configuration; tensors on the
CPU, or on another rank's GPU, are an illegal address.

Why it matters: The rank ends with no traceback; the launcher only says exit code 1.""",
    signatures=(
        Signature(
            words="error+line+file",
            pattern=r"^Error (?P<why>invalid configuration argument|an illegal memory access was encountered|invalid "
            r"argument|no kernel image is available for execution on the device|invalid device function|out of memory"
            r"|invalid resource handle|named symbol not found) at line \d{1,6} in file "
            r"(?P<file>\S{0,200}(?:ops|pythonInterface)\.(?:cu|c|cpp))",
            sample="Error invalid configuration argument at line 216 in file /mmfs1/gscratch/bitsandbytes/csrc/ops.cu",
        ),
    ),
)

QUANTIZED_MODEL_MOVED = Rule(
    id="quantized-model-moved",
    stage=Stage.RUN,
    title="a 4-bit or 8-bit model (bitsandbytes) was to be moved or cast, as DeepSpeed does with every model: .to() "
    "is refused",
    fix="upgrade transformers, accelerate, peft and DeepSpeed, which leave quantized models where they are; wrap only "
    "the adapter's "
    "model with the Trainer or accelerate; or load the model without load_in_4bit and load_in_8bit",
    steps=(step("python -m pip install -U transformers accelerate peft deepspeed bitsandbytes"),),
    manual="""Quantized weights are bound to the device and the type that they were made with, and transformers
refuses .to(), .half() and .cuda() on such a model.

deepspeed.initialize moves and casts the model that it is given.

Why it matters: The engine cannot be made.""",
    signatures=(
        Signature(
            words="supported+bit+bitsandbytes supported+bit+models supported+quantized",
            pattern=r"ValueError: (?:`\.(?:to|half\(\)|float\(\)|cuda|bfloat16\(\))`|Calling "
            r"`(?:to|cuda|half|float)\(\)`) is not supported "
            r"for (?:`?\w{1,10}-bit`?|quantized)",
            sample="ValueError: `.to` is not supported for `4-bit` or `8-bit` bitsandbytes models. Please use the "
            "model as it is.",
        ),
    ),
)

QUANTIZED_WITHOUT_ADAPTER = Rule(
    id="quantized-without-adapter",
    stage=Stage.RUN,
    title="a quantized model is to be trained, and it has no adapter (LoRA) that could be",
    fix="attach a LoRA adapter (get_peft_model, peft_config) before the Trainer is made; or load the model without "
    "quantization",
    manual="""Quantized weights stay as they are in training; only an adapter beside them learns (QLoRA).

Why it matters: The Trainer refuses to start.""",
    signatures=(
        Signature(
            words="tuning+purely+quantized fine+quantized+tuning",
            pattern=r"ValueError: (?:You cannot perform fine-tuning on purely quantized models|The model you are "
            r"trying to fine-tune is "
            r"quantized with|The model you want to train is loaded in 8-bit precision)",
            sample="ValueError: You cannot perform fine-tuning on purely quantized models. Please attach trainable "
            "adapters on top of "
            "the quantized model",
        ),
    ),
)

MODEL_SPREAD_BY_DEVICE_MAP = Rule(
    id="model-spread-by-device-map",
    stage=Stage.RUN,
    title="the model was spread over devices by device_map, and each rank needs a whole one on its own GPU",
    fix="leave device_map='auto' out of from_pretrained; a quantized model takes device_map={'': LOCAL_RANK}, its own "
    "GPU "
    "(torch.cuda.current_device()) for each rank",
    manual="""device_map='auto' puts the layers of one model on all GPUs that a process sees. In a distributed run
every rank has a model.

Why it matters: accelerate refuses to prepare the model; without the check each rank would use all GPUs.""",
    signatures=(
        Signature(
            words="train+model+device_map train+model+precision train+model+loaded",
            pattern=r"ValueError: You can't train a model that has been loaded (?:with `device_map='auto'` in any "
            r"distributed mode|in "
            r"8-bit(?: or 4-bit)? precision (?:on a different device|with CPU or disk offload))",
            sample="ValueError: You can't train a model that has been loaded with `device_map='auto'` in any "
            "distributed mode.",
        ),
    ),
)

RULES = (
    BITSANDBYTES_UNLOADABLE,
    BITSANDBYTES_KERNEL_FAILED,
    QUANTIZED_MODEL_MOVED,
    QUANTIZED_WITHOUT_ADAPTER,
    MODEL_SPREAD_BY_DEVICE_MAP,
)
