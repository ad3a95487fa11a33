"""Rules of torch.compile and DeepCompile, and of the hybrid engine that switches between training and generation."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

TORCH_COMPILE_FAILED = Rule(
    id="torch-compile-failed",
    stage=Stage.RUN,
    title="torch.compile could not compile this model: {what|see the message}",
    fix="run without it first: TORCH_COMPILE_DISABLE=1, torch_compile False in the arguments, compile.deepcompile "
    "false in the DeepSpeed configuration. Then call engine.compile() instead of torch.compile(model) (under "
    "ZeRO-3 its hooks must be known), with a newer torch and DeepSpeed",
    steps=(step("TORCH_COMPILE_DISABLE=1 python SCRIPT.py"), step("export TORCH_LOGS=+dynamo TORCHDYNAMO_VERBOSE=1")),
    explained_by=(
        "gpu-oom",
        "host-compiler-missing",
        "python-headers-missing",
        "triton-cannot-compile",
        "triton-kernel-failed",
    ),
    manual="""torch.compile reads the Python of the forward pass (Dynamo), and compiles it by a back end (Inductor, Triton).

ZeRO-3 gathers weights in hooks around each module, which Dynamo has to break the graph for; activation checkpointing
and compiled autograd make it harder. DeepCompile is DeepSpeed's own way for that.

Why it matters: The first step fails. Without compiling the training runs, only slower.""",
    signatures=(
        Signature(
            words="_dynamo+exc _inductor+exc backendcompilerfailed internaltorchdynamoerror torchruntimeerror "
            "loweringexception inductorerror",
            pattern=r"^(?:torch\._(?:dynamo|inductor)\.exc\.)(?P<what>InternalTorchDynamoError"
            r"|BackendCompilerFailed|TorchRuntimeError|Unsupported|InductorError|LoweringException"
            r"|CppCompileError|UserError|FailOnRecompileLimitHit)\b",
            tier=Tier.GENERIC,
            sample="torch._dynamo.exc.InternalTorchDynamoError: name 'torch' is not defined",
        ),
        Signature(
            words="attempting+broadcast+dimension",
            pattern=r"^RuntimeError: Attempting to broadcast a dimension of length 0 at -\d! Mismatching argument at "
            r"index \d had (?P<what>torch\.Size\(\[0\]\))",
            title="torch.compile traced a weight that ZeRO-3 has partitioned ({what})",
            fix="switch compiled autograd off (compile without it), call engine.compile() instead of torch.compile, "
            "or use ZeRO-2 with torch.compile",
            sample="RuntimeError: Attempting to broadcast a dimension of length 0 at -1! Mismatching argument at "
            "index 1 had torch.Size([0]); but expected shape should be broadcastable to [100, 120]",
        ),
    ),
)

HYBRID_ENGINE = Rule(
    id="hybrid-engine",
    stage=Stage.RUN,
    title="DeepSpeed's hybrid engine cannot take this model, or not with these settings{what_hint}",
    fix="leave hybrid_engine out (enable_hybrid_engine False): generation is slower then and works; else choose an "
    "inference_tp_size that is not larger than the number of GPUs and divides it, and a DeepSpeed whose "
    "containers know the model (OPT, Bloom, Llama)",
    steps=(step("python -m pip install -U deepspeed"), instead("python -m dsdoctor explain hybrid-engine")),
    manual="""The hybrid engine replaces the layers of a model by inference kernels while it generates, and by the trained ones
otherwise.

It has containers for some architectures only; for others its list of containers stays empty. inference_tp_size makes
groups over the ranks.

Why it matters: deepspeed.initialize, generate or the first step of RLHF fails.""",
    signatures=(
        Signature(
            words="deepspeedhybridengine+mp_group",
            pattern=r"AttributeError: 'DeepSpeedHybridEngine' object has no attribute "
            r"'(?P<what>mp_group|_inference_containers|_fwd_quantize)'",
            title="the hybrid engine was not set up for tensor parallelism ({what}): inference_tp_size is larger "
            "than the number of ranks, or 1 in a release that needs the group",
            sample="AttributeError: 'DeepSpeedHybridEngine' object has no attribute 'mp_group'",
        ),
        Signature(
            words="list+range tuple+range",
            pattern=r"^IndexError: (?:list|tuple) index out of range",
            after=r"_inference_containers\[|module_inject[/\\]containers[/\\]\w{1,40}\.py.{0,30}in get_hidden_heads",
            title="the hybrid engine has no container for this model, or ZeRO-3 has partitioned the weights that it "
            "reads",
            sample="    if(self._inference_containers[0].module.attention.attn_qkvw is not None and \\\n"
            "IndexError: list index out of range",
        ),
        Signature(
            words="attribute+set_params_wo_copy container+attribute ds_bloomcontainer+attribute "
            "ds_llama2container+attribute ds_llamacontainer+attribute ds_optcontainer+attribute "
            "ds_gptneoxcontainer+attribute",
            pattern=r"AttributeError: '(?P<what>DS_\w{1,40}Container)' object has no attribute '\w{1,60}'",
            title="{what} of this DeepSpeed does not support the hybrid engine",
            sample="AttributeError: 'DS_BloomContainer' object has no attribute 'set_params_wo_copy'",
        ),
        Signature(
            words="shared+prefill",
            pattern=r"RuntimeError: (?P<what>Shared prefill (?:does not support|requires) .{1,80})",
            title="the hybrid engine refuses a setting: {what}",
            sample="RuntimeError: Shared prefill does not support ZeRO stage 3",
        ),
        Signature(
            words="operand+nonetype",
            pattern=r"^TypeError: unsupported operand type\(s\) for \*: 'float' and 'NoneType'",
            after=r"_total_batch_size|hybrid_engine\.py",
            title="the hybrid engine prints its speed after eval(), and has no batch size yet: it generated nothing "
            "before",
            fix="call actor.eval() only after a generation through the engine, or upgrade DeepSpeed; else leave "
            "hybrid_engine out",
            sample="    f'|CurSamplesPerSec={(1 / latency * self._total_batch_size):.2f} ' + \\\n"
            "TypeError: unsupported operand type(s) for *: 'float' and 'NoneType'",
        ),
    ),
)

RULES = (TORCH_COMPILE_FAILED, HYBRID_ENGINE)
