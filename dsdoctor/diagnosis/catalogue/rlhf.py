"""Rules of reinforcement learning with trl, verl and OpenRLHF: batches that do not divide, vLLM's devices, images."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

GENERATIONS_DO_NOT_DIVIDE = Rule(
    id="generations-do-not-divide",
    stage=Stage.RUN,
    title="GRPO: the global batch ({batch|ranks x batch size}) is no multiple of num_generations ({generations|the "
    "generations of each prompt})",
    fix="choose num_generations, per_device_train_batch_size and the number of ranks so that ranks x "
    "per_device_train_batch_size x "
    "gradient_accumulation_steps is a multiple of num_generations (and num_generations at least 2)",
    manual="""GRPO compares several generations of one prompt, and the ranks share the generations of a batch.

Where vLLM has a GPU of its own there is one rank fewer, so numbers that fitted 8 ranks do not fit 7.

Why it matters: The trainer cannot be made.""",
    signatures=(
        Signature(
            words="divisible+generations",
            pattern=r"ValueError: The (?:global )?(?:train|eval|effective|generation) ?batch[ _]size "
            r"\((?P<batch>[^)]{1,60})\) must be (?:evenly )?"
            r"divisible by (?:the number of generations per prompt|num_generations|the number of generations) "
            r"\(?(?P<generations>\d{1,6})\)?",
            sample="ValueError: The global train batch size (7 x 1) must be evenly divisible by the number of "
            "generations per prompt (8).",
        ),
    ),
)

VLLM_DEVICE_MISSING = Rule(
    id="vllm-device-missing",
    stage=Stage.RUN,
    title="trl wants a GPU of its own for vLLM ({device|the next one}), and all of them are taken by ranks",
    fix="start one rank fewer than there are GPUs (accelerate launch --num_processes N-1), or let vLLM share the GPUs "
    "of the ranks: "
    "vllm_mode='colocate' in a newer trl (vllm_device='cuda:0' in an older one)",
    steps=(step("python -m pip install -U trl vllm"), step("accelerate launch --num_processes 7 SCRIPT.py")),
    manual="""With use_vllm=True an older trl runs vLLM on the GPU behind those of the ranks.

Why it matters: The trainer cannot be made.""",
    signatures=(
        Signature(
            words="device+vllm+available",
            pattern=r"ValueError: The requested device for vllm \((?P<device>[\w:]{1,12})\) is not available",
            sample="ValueError: The requested device for vllm (cuda:1) is not available. You are likely using vLLM "
            "without restricting "
            "the number of GPUs for training.",
        ),
        Signature(
            words="vllm_mode+server+colocate",
            pattern=r"ValueError: vllm_mode must be either 'server' or 'colocate', got '(?P<device>server|colocate)'",
            title="trl refuses vllm_mode '{device}' on the ranks beside the first: a fault of trl of August 2025",
            fix="upgrade trl; or take the release before (0.21)",
            steps=(step("python -m pip install -U trl"),),
            sample="ValueError: vllm_mode must be either 'server' or 'colocate', got 'server'.",
        ),
    ),
)

VLLM_MEMORY = Rule(
    id="vllm-memory",
    stage=Stage.RUN,
    title="vLLM does not get the GPU memory that it asks for, beside the training on the same GPU",
    fix="lower gpu_memory_utilization (vllm_gpu_memory_utilization, rollout.gpu_memory_utilization), raise vLLM's "
    "tensor_parallel_size, free torch's cache before it wakes up (torch.cuda.empty_cache()), offload the optimizer, or give "
    "vLLM GPUs of its own",
    steps=(step("nvidia-smi"),),
    manual="""vLLM reserves its share of the GPU, weights and key-value cache, when it starts or wakes up.

With the training on the same GPU (colocate) less is free than gpu_memory_utilization says: parameters, optimizer states and
torch's cache are there too, and waking up needs the whole share at once.

Why it matters: Generation ends, and with it the training; the share is one number in the configuration.""",
    signatures=(
        Signature(
            words="cumem_allocator",
            pattern=r"CUDA Error: out of memory at \S{0,160}cumem_allocator\.cpp",
            title="vLLM wakes up, and the GPU has less memory free than it needs: the training on the same GPU holds the rest",
            sample="RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        ),
        Signature(
            words="memory+utilization+less free+memory+utilization",
            pattern=r"ValueError: Free memory on device .{0,120}is less than desired GPU memory utilization",
            sample="ValueError: Free memory on device (10.1/79.3 GiB) on startup is less than desired GPU memory utilization "
            "(0.9, 71.4 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        ),
        Signature(
            words="cache+blocks+memory",
            pattern=r"ValueError: No available memory for the cache blocks",
            title="vLLM has no memory left for its key-value cache",
            fix="raise gpu_memory_utilization where the GPU has room, else lower max_model_len, raise vLLM's "
            "tensor_parallel_size, or free what the training holds on the same GPU",
            sample="ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine.",
        ),
        Signature(
            words="cache+seq+larger cache+kv+max",
            pattern=r"ValueError: (?:The model's max seq len \(\d{1,9}\) is larger than the maximum number of tokens that can "
            r"be stored in KV cache|To serve at least one request with the models?'s max seq len)",
            title="vLLM's key-value cache does not hold one sequence of max_model_len",
            fix="lower max_model_len (vllm_max_model_length) to what prompts and answers need, or raise gpu_memory_utilization",
            sample="ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored "
            "in KV cache (10240). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
        ),
    ),
)

BATCH_NOT_SHARED_EVENLY = Rule(
    id="rl-batch-not-even",
    stage=Stage.RUN,
    title="verl cannot share the batch evenly among the ranks: {what}",
    fix="make data.train_batch_size (times rollout.n) a multiple of nnodes x n_gpus_per_node, ppo_mini_batch_size a "
    "divisor of it that is at least "
    "the number of ranks (divided by sequence parallelism), and ppo_micro_batch_size_per_gpu a divisor of that; drop "
    "the last, smaller batch",
    manual="""verl divides a batch into equal parts, one for each rank, and these into mini-batches and micro-batches.

Why it matters: The run ends at its first batch, or at the last one of the data.""",
    signatures=(
        Signature(
            words="equal+chunk",
            pattern=r"AssertionError: (?P<what>only support equal chunk\. Got size of DataProto \d{1,9} and chunk "
            r"\d{1,6})",
            sample="AssertionError: only support equal chunk. Got size of DataProto 2 and chunk 4.",
        ),
        Signature(
            words="ppo_mini_batch_size ppo_micro_batch_size_per_gpu ppo_micro_batch_size real_train_batch_size",
            pattern=r"^(?:Assertion|Value)Error: (?P<what>.{0,60}\b(?:ppo_mini_batch_size|ppo_micro_batch_size(?:_per_"
            r"gpu)?|real_train_batch_size)\b.{1,120})",
            sample="AssertionError: ppo_mini_batch_size 0 should be larger than 0 after normalization",
        ),
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"assert config\.data\.train_batch_size >= config\.actor_rollout_ref\.actor\.ppo_mini_batch_size",
            title="data.train_batch_size is smaller than ppo_mini_batch_size",
            sample="    assert config.data.train_batch_size >= config.actor_rollout_ref.actor.ppo_mini_batch_size\nAss"
            "ertionError",
        ),
    ),
)

IMAGE_TOKENS_DIFFER = Rule(
    id="image-tokens-differ",
    stage=Stage.RUN,
    title="the number of image tokens in the text is not that of the image features: {what|they do not fit}",
    fix="do not cut multimodal samples (raise max_length or cutoff_len, lower max_pixels), put one placeholder into "
    "the text for each image, and take "
    "processor and model of one release of transformers",
    manual="""A multimodal model replaces the image tokens of the text by the features of the images, and their
numbers differ.

Texts that were cut at the maximal length lose image tokens, and a processor of another version counts them
differently.

Why it matters: The batch cannot be computed; on a GPU it shows as a device-side assert.""",
    signatures=(
        Signature(
            words="image+features+tokens",
            pattern=r"ValueError: (?P<what>(?:Image|Video) features and (?:image|video) tokens do not match.{0,120})",
            sample="ValueError: Image features and image tokens do not match: tokens: 1023, features 1024",
        ),
        Signature(
            words="totalelements+srcsize",
            pattern=r"masked_scatter_size_check.{0,120}Assertion `totalElements <= srcSize` failed",
            title="masked_scatter: the text has more image tokens than there are image features",
            sample="IndexKernel.cu:466: masked_scatter_size_check: block: [0,0,0], thread: [0,0,0] Assertion "
            "`totalElements <= srcSize` failed.",
        ),
    ),
)

MODEL_PARALLEL_BESIDE = Rule(
    id="model-parallel-beside",
    stage=Stage.LAUNCH,
    title="ms-swift sees several GPUs for each rank and would divide the model among them (MP), which does not go "
    "together with DeepSpeed",
    fix="start one rank for each GPU: NPROC_PER_NODE equal to the number of GPUs in CUDA_VISIBLE_DEVICES, both before "
    "the word swift",
    steps=(step("NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 swift sft ..."),),
    manual="""A rank that sees two GPUs or more lets device_map spread the model over them.

Why it matters: ms-swift refuses to start.""",
    signatures=(
        Signature(
            words="deepspeed+compatible+mp deepspeed+compatible+device_map",
            pattern=r"(?:Assertion|Value)Error: DeepSpeed is not compatible with (?P<what>MP|`?device_map`?)",
            sample="AssertionError: DeepSpeed is not compatible with MP.",
        ),
    ),
)

RULES = (
    GENERATIONS_DO_NOT_DIVIDE,
    VLLM_DEVICE_MISSING,
    VLLM_MEMORY,
    BATCH_NOT_SHARED_EVENLY,
    IMAGE_TOKENS_DIFFER,
    MODEL_PARALLEL_BESIDE,
)
