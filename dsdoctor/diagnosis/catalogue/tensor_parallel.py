"""Rules of tensor parallelism and of DeepSpeed's inference engine: AutoTP, injection policies, heads, meta tensors, lengths."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

INJECTED = r"module_inject[/\\]|deepspeed[/\\]inference[/\\]|model_implementations[/\\]"
"""Frames of DeepSpeed's replaced layers."""

TENSOR_PARALLEL_MODEL = Rule(
    id="tensor-parallel-model",
    stage=Stage.RUN,
    title="DeepSpeed does not know how to divide this model among the GPUs (AutoTP has no policy for it)",
    fix="give deepspeed.init_inference an injection_policy for the model: {Block: ('attention.output', 'mlp.output')}, "
    "the linear layers whose outputs are summed; or replace_with_kernel_inject=True if DeepSpeed has kernels for it",
    manual="""AutoTP looks for the linear layers of each block whose outputs must be summed over the GPUs, and found none that it
knows.

A policy names them: for a T5Block ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo"). Kernel injection and
an own policy exclude each other. A wrong policy shows later as shapes that do not fit.

Why it matters: The engine cannot be made, or the first forward fails.""",
    signatures=(
        Signature(
            words="policy+determine autotp+supported policy+found",
            pattern=r"(?:Assertion|Value)Error: (?:Not able to determine model policy automatically|AutoTP not "
            r"supported for model|No default policy found)",
            sample="AssertionError: Not able to determine model policy automatically. Please provide policy.",
        ),
        Signature(
            words="pipeline+children stablediffusionpipeline+children diffusionpipeline+children "
            "textgenerationpipeline+children stablediffusionxlpipeline+children fluxpipeline+children",
            pattern=r"AttributeError: '(?P<what>\w{0,60}Pipeline)' object has no attribute 'children'",
            title="deepspeed.init_inference was given a {what}, which is no torch module",
            fix="give init_inference the module inside: pipe.model (transformers), pipe.unet or pipe.transformer "
            "(diffusers), and put the result back into the pipeline",
            sample="AttributeError: 'StableDiffusionPipeline' object has no attribute 'children'",
        ),
        Signature(
            words="injection+policy",
            pattern=r"Error: Cannot use both user specified injection policy and kernel injection",
            title="an injection_policy is given together with replace_with_kernel_inject, and only one of them can "
            "be used",
            fix="remove injection_policy, or set replace_with_kernel_inject=False",
            sample="AssertionError: Cannot use both user specified injection policy and kernel injection",
        ),
        Signature(
            words="injection+policy torch+subclass",
            pattern=r"Error: (?:Injection policy layer'(?P<name>.{1,120}?)' not valid|(?P<name2>.{1,120}?) is not a "
            r"subclass of torch\.nn\.Module)",
            title="the injection_policy of init_inference names something that is no layer of the model{name_hint}",
            fix="let the keys of injection_policy be classes of the model's blocks (subclasses of torch.nn.Module), "
            "and the values names of linear layers inside of them",
            sample="ValueError: Injection policy layer'attention.out' not valid.",
        ),
        Signature(
            words="attention+head+count",
            pattern=r"ValueError: Cannot determine the attention head count for (?P<name>\w{1,80})",
            title="AutoTP cannot find how many attention heads {name} has",
            fix="give the model's config num_attention_heads, or use a tp_size of 1 for it",
            sample="ValueError: Cannot determine the attention head count for MyAttention.",
        ),
        Signature(
            words="mat1+mat2",
            pattern=r"^RuntimeError: mat1 and mat2 shapes cannot be multiplied "
            r"\((?P<shapes>[1-9]\d{0,8}x[1-9]\d{0,8} and [1-9]\d{0,8}x[1-9]\d{0,8})\)",
            after=INJECTED,
            title="under tensor parallelism the shapes of two layers do not fit ({shapes}): AutoTP's injection "
            "policy has divided the wrong linear layers, or the heads do not divide by tp_size",
            fix="give an injection_policy that names every linear layer whose output is summed (attention output and "
            "MLP output), take a tp_size that divides the heads, or a newer DeepSpeed",
            sample='  File "/venv/deepspeed/module_inject/layers.py", line 20, in forward\n'
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (15x4096 and 2048x11008)",
        ),
        Signature(
            words="shape+invalid",
            pattern=r"^RuntimeError: shape '\[(?P<shape>[\d, -]{1,60})\]' is invalid for input of size [1-9]",
            after=r"module_inject[/\\]|deepspeed[/\\]inference[/\\]engine",
            title="under tensor parallelism a layer still counts all heads (shape [{shape}]), and this rank holds a "
            "part of them",
            fix="take a tp_size that divides num_attention_heads and num_key_value_heads; give an injection_policy, "
            "or use a newer DeepSpeed that knows this model",
            sample='  File "/venv/deepspeed/inference/engine.py", line 560, in forward\n'
            "RuntimeError: shape '[1, 5, 32, 128]' is invalid for input of size 10240",
        ),
    ),
)

TENSOR_PARALLEL_SIZE = Rule(
    id="tensor-parallel-size",
    stage=Stage.RUN,
    title="{what|the attention heads} cannot be divided by the tensor-parallel size {size|that was asked for}",
    fix="choose a tp_size (mp_size, tensor_model_parallel_size) that divides num_attention_heads, num_key_value_heads "
    "and the hidden sizes of the model",
    manual="""Tensor parallelism gives each GPU the same number of attention heads, and an equal part of every weight matrix.

A model with 52 heads runs on 2, 4 or 13 GPUs, not on 8. With grouped-query attention the key and value heads count
too.

Why it matters: The engine cannot be made.""",
    signatures=(
        Signature(
            words="num_heads+divisible num_attention_heads+divisible heads+mp_size attention+divisible",
            pattern=r"Error: (?P<what>(?:num_heads|num_attention_heads|num_key_value_heads|[Nn]umber of attention "
            r"heads|[Aa]ttention heads|num_query_groups)[^:]{0,40}?) (?:must be|should be|is not|not) "
            r"(?:evenly )?divisible by (?:the )?(?P<size>(?:mp_size|tp_size|tensor|world_size|model).{0,60})",
            sample="AssertionError: num_heads (52) must be divisible by mp_size (8)",
        ),
        Signature(
            words="larger+num_heads autotp+shard projection+multiple codgen+autotp",
            pattern=r"Error: (?:world_size (?P<size>\d{1,5}) is larger than half of (?P<what>num_heads "
            r"\d{1,5})|AutoTP cannot shard this QWen attention across (?P<size2>\d{1,5}) ranks|projection "
            r"size (?P<what3>\d{1,9}) should be multiple of TP world size (?P<size3>\d{1,5})|codgen autoTP "
            r"requires num_kv_heads)",
            sample="RuntimeError: world_size 8 is larger than half of num_heads 12",
        ),
        Signature(
            words="not+divisible",
            pattern=r"^(?:Assertion|Value)Error: (?P<what>\d{1,9}) is not divisible by (?P<size>\d{1,6})$",
            after=r"megatron[/\\]|tensor_parallel[/\\]",
            sample='  File "/work/megatron/core/utils.py", line 20, in ensure_divisibility\nAssertionError: 50 is '
            "not divisible by 8",
        ),
    ),
)

TENSOR_PARALLEL_SETTINGS = Rule(
    id="tensor-parallel-settings",
    stage=Stage.RUN,
    title="the settings of tensor parallelism contradict each other: {what|in two places}",
    fix="name the tensor-parallel size in one place only: tensor_parallel.autotp_size in the configuration, or "
    "tp_model_init, or an mpu that deepspeed.initialize gets",
    manual="""The tensor-parallel size, its group and its dtype can be given in several places, and they say different things.

Within a tensor-parallel group all ranks must get the same batch: the sampler divides by the data-parallel size.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="tp_model_init conflicting+autotp_size autotp_size+match",
            pattern=r"ValueError: (?P<what>(?:Conflicting (?:tp_model_init|tensor_parallel|dtype)|tp_model_init "
            r"(?:provided|tp_size)|tensor_parallel\.tp\.tp_size \().{1,140})",
            sample="ValueError: Conflicting tensor_parallel.autotp_size in config (4) and tp_model_init (2).",
        ),
        Signature(
            words="data_parallel_size+tensor_model_parallel_size",
            pattern=r"AssertionError: (?P<what>data_parallel_size \(\d{1,6}\) \* tensor_model_parallel_size "
            r"\(\d{1,6}\).{0,80})",
            sample="AssertionError: data_parallel_size (2) * tensor_model_parallel_size (4) != world_size (4)",
        ),
        Signature(
            words="inconsistency+tp",
            pattern=r"(?:Assertion|Runtime|Value)Error: Data inconsistency within the TP group",
            title="the ranks of one tensor-parallel group were given different batches",
            fix="let the data loader's sampler divide by the data-parallel size, so that all ranks of a "
            "tensor-parallel group get the same batch (DistributedSampler with the data-parallel rank; Hugging "
            "Face: a newer transformers and accelerate)",
            sample="AssertionError: Data inconsistency within the TP group. Please check the Dataloader "
            "implementation to ensure consistency.",
        ),
    ),
)

META_TENSORS = Rule(
    id="meta-tensors",
    stage=Stage.RUN,
    title="parameters are on the meta device: they have a shape and no data, as their weights were not loaded{name_hint}",
    fix="load the values before the model is moved: give init_inference checkpoint=, or load without "
    "deepspeed.OnDevice('meta'), init_empty_weights, device_map and low_cpu_mem_usage; these do not go together with "
    "ZeRO-3 (zero.Init fills the model), and 4-bit weights under it need ZeRO-2. The log names the weights that were 'newly "
    "initialized' or missing in the checkpoint",
    steps=(step("python -m pip install -U transformers accelerate peft"),),
    manual="""A model was made without memory for its weights, and something wants to move or use them.

deepspeed.OnDevice(device="meta"), accelerate's init_empty_weights, device_map="auto" and low_cpu_mem_usage=True make
such parameters. Weights that the checkpoint does not have (a new head, other names, layers of a script's own, tied
weights) stay so after loading, and so do 4-bit models under ZeRO-3.

Why it matters: Such a tensor can be neither moved nor trained, and the engine cannot be made.""",
    signatures=(
        Signature(
            words="meta+tensor+copy meta+tensor+data",
            pattern=r"(?:NotImplemented|Runtime)Error: Cannot copy out of meta tensor; no data",
            sample="NotImplementedError: Cannot copy out of meta tensor; no data! Please use "
            "torch.nn.Module.to_empty() instead of torch.nn.Module.to() when moving module from meta to a "
            "different device.",
        ),
        Signature(
            words="meta+expected+device",
            pattern=r"(?:NotImplemented|Runtime|Value)Error: (?:Tensor on device meta is not on the expected device"
            r"|Tensor on device \S{1,10} is not on the expected device meta"
            r"|Expected all tensors to be on the same device, but .{1,80}\bmeta\b)",
            tier=Tier.GENERIC,
            sample="RuntimeError: Tensor on device cuda:0 is not on the expected device meta!",
        ),
        Signature(
            words="item+meta+tensors",
            pattern=r"RuntimeError: Tensor\.item\(\) cannot be called on meta tensors",
            title="the model's own code reads a number out of a tensor (.item()) while the model is made on the meta "
            "device, as ZeRO-3 and low_cpu_mem_usage do",
            fix="make such tensors with device='cpu' in the model's __init__ (torch.linspace(..., device='cpu')), or "
            "take newer code of the model; or make the model without zero.Init: zero3_init_flag: false, "
            "low_cpu_mem_usage=False",
            sample="RuntimeError: Tensor.item() cannot be called on meta tensors",
        ),
        Signature(
            words="meta+value+device",
            pattern=r"^ValueError: (?P<name>[\w.]{1,160}) is on the meta device, we need a `value` to put in on",
            title="{name} is on the meta device and the checkpoint has no value for it",
            sample="ValueError: weight is on the meta device, we need a `value` to put in on 0.",
        ),
        Signature(
            words="meta+container",
            pattern=r"AssertionError: Meta Tensor checkpoint loading not supported in (?P<name>\w{1,80}) container",
            title="DeepSpeed's {name} cannot load its weights into meta tensors",
            fix="load the model with its weights (no deepspeed.OnDevice('meta')), then call init_inference",
            sample="AssertionError: Meta Tensor checkpoint loading not supported in DS_BERTContainer container",
        ),
    ),
)

INFERENCE_LIMITS = Rule(
    id="inference-limits",
    stage=Stage.RUN,
    title="DeepSpeed's inference engine does not do this: {what|see the message}",
    fix="change the call as the message says, or run the model without DeepSpeed's kernels "
    "(replace_with_kernel_inject=False)",
    manual="""The inference engine's kernels exist for some lengths, types and ways of generating only.

max_out_tokens (1024 by default) is the longest input and output together. num_beams above 1 and CUDA graphs of
several GPUs are not supported.

Why it matters: The engine cannot be made, or generation stops.""",
    signatures=(
        Signature(
            words="exceeds+maximum+length",
            pattern=r"RuntimeError: Input with size (?P<what>\d{1,9}) exceeds maximum length of (?P<most>\d{1,9})",
            title="the input has {what} tokens, and the inference engine was made for {most} (max_out_tokens)",
            fix="give init_inference a larger max_out_tokens (max_tokens), or shorten the input",
            sample="RuntimeError: Input with size 1500 exceeds maximum length of 1024. Please increase max_tokens in "
            "the DeepSpeed Inference Config.",
        ),
        Signature(
            words="num_beams+support cuda+graph+supported injection+fp16 pipeline+inference+parallelism "
            "enable_cuda_graph+supported",
            pattern=r"Error: (?P<what>DeepSpeed does not support `num_beams` > 1|Cuda graph is not supported for "
            r"model parallelism|Generic injection only supported with FP16|pipeline parallelism is currently "
            r"not supported in inference|enable_cuda_graph is not supported with replace_with_kernel_inject)",
            sample="NotImplementedError: DeepSpeed does not support `num_beams` > 1, if this is important to you "
            "please add your request to: https://github.com/deepspeedai/DeepSpeed/issues/2506",
        ),
        Signature(
            words="data+type+accelerator",
            pattern=r"ValueError: (?P<what>Data type \S{1,40} is not supported by \w{1,20} accelerator)",
            sample="ValueError: Data type torch.float16 is not supported by cpu accelerator",
        ),
        Signature(
            words="attribute+scale",
            pattern=r"^AttributeError: '(?:Parameter|Tensor)' object has no attribute 'scale'",
            after=INJECTED + r"|ops[/\\]transformer[/\\]inference|weight\.scale",
            title="kernel injection reads an int8 scale from a weight that was not quantized: this DeepSpeed release "
            "has the bug for this model",
            fix="upgrade DeepSpeed, or leave replace_with_kernel_inject out (AutoTP), or give dtype=torch.half and "
            "replace_with_kernel_inject=True on a model made on the CPU",
            steps=(step("python -m pip install -U deepspeed"),),
            sample='  File "/venv/deepspeed/ops/transformer/inference/op_binding/qkv_gemm.py", line 90, in forward\n'
            "AttributeError: 'Parameter' object has no attribute 'scale'",
        ),
        Signature(
            words="clear+kv+cache",
            pattern=r"AssertionError: Function to clear the KV cache is invoked, but no request consumes KV cache",
            title="the inference server (MII, FastGen) ran out of KV cache: the prompts and answers of all requests "
            "do not fit into the blocks that were left on the GPU",
            fix="send fewer requests at a time, shorten max_length and max_new_tokens, or give the cache more room: "
            "more GPUs (tensor_parallel), a smaller model, no other process on the GPU",
            sample="AssertionError: Function to clear the KV cache is invoked, but no request consumes KV cache",
        ),
    ),
)

INFERENCE_CHECKPOINT = Rule(
    id="inference-checkpoint",
    stage=Stage.RUN,
    title="the checkpoint given to init_inference does not have the form that DeepSpeed needs: {what|see the message}",
    fix="give checkpoint= a JSON of the form {'type': 'BLOOM', 'checkpoints': [files], 'version': 1.0}, with files that "
    "exist; load it with the tp_size it was saved with (save_mp_checkpoint_path writes such a set)",
    manual="""init_inference(checkpoint=...) takes a description of the files, which hold 'model' or 'module'.

A set that was saved for several GPUs holds one file for each of them, and can be merged or split only by whole factors.

Why it matters: The engine cannot be made.""",
    signatures=(
        Signature(
            words="checkpoint+keys sd+checkpoints checkpoint+mp_world_size checkpoint+type merging+tensors",
            pattern=r"AssertionError: (?P<what>checkpoint (?:contains neither|has both) 'model' (?:or|and) 'module' "
            r"keys|Invalid checkpoints and world size for sd (?:merge|split)|checkpoint count \d{1,6} is "
            r"different from saved mp_world_size \d{1,6}|\S{1,40} checkpoint type is not supported|Merging "
            r"tensors is not allowed here)",
            sample="AssertionError: checkpoint contains neither 'model' or 'module' keys, not sure how to proceed",
        ),
    ),
)

RULES = (
    TENSOR_PARALLEL_MODEL,
    TENSOR_PARALLEL_SIZE,
    TENSOR_PARALLEL_SETTINGS,
    META_TENSORS,
    INFERENCE_LIMITS,
    INFERENCE_CHECKPOINT,
)
