"""When a training loads which op: DeepSpeed's own call sites, each with the configuration under which it is reached.

A site has DeepSpeed's file, function and line as they are in VERSION; a test compares them with the installed source, so that a
site that comes, goes or moves is seen. To add one, write one record in LOADS and its condition
in op_conditions.py, or one in NOT_BY_CONFIG with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dsdoctor.builder.source import op_conditions
from dsdoctor.builder.source.load_sites import LoadSite
from dsdoctor.builder.source.training_config import TrainingConfig

VERSION = "0.19.8"
BOTH = ("cuda", "cpu")

When = Callable[[TrainingConfig], str]
"""Why a training with this configuration loads the op, in words of the configuration; "" where it does not."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One call site, the accelerators that reach it, and when."""

    op: str
    file: str
    function: str
    line: str
    when: When
    accelerators: tuple[str, ...] = BOTH

    @property
    def site(self) -> LoadSite:
        """Where it is."""
        return LoadSite(file=self.file, function=self.function, op=self.op, line=self.line)


@dataclass(frozen=True, kw_only=True)
class NotByConfig:
    """Call sites that no training configuration decides: all in a file or below a folder (``place``), and why."""

    place: str
    reason: str


def _any_file_by_aio(config: TrainingConfig) -> str:
    """gds is built on async_io's builder, and loads pin_memory as that does."""
    reasons = (load.when(config) for load in LOADS if load.op in {"async_io", "gds"})
    return next((reason for reason in reasons if reason), "")


def _random_ltd_site(function: str) -> Load:
    return Load(
        op="random_ltd",
        file="ops/random_ltd/dropping_utils.py",
        function=function,
        line="random_ltd_module = RandomLTDBuilder().load()",
        when=op_conditions.random_ltd,
    )


LOADS = (
    Load(
        op="deepspeed_shm_comm",
        file="comm/torch.py",
        function="build_shm_op",
        line='builder = get_accelerator().create_op_builder("ShareMemCommBuilder")',
        when=op_conditions.any_training,
        accelerators=("cpu",),
    ),
    Load(
        op="cpu_adam",
        file="ops/adam/cpu_adam.py",
        function="DeepSpeedCPUAdam.__init__",
        line="self.ds_opt_adam = CPUAdamBuilder().load()",
        when=op_conditions.cpu_adam,
    ),
    Load(
        op="cpu_adam",
        file="runtime/zenflow/zenflow_utils.py",
        function="start_optimizer_process",
        line="op = CPUAdamBuilder().load()",
        when=op_conditions.zenflow,
    ),
    Load(
        op="cpu_adam",
        file="runtime/zenflow/zenflow_utils.py",
        function="zenflow_optimizer_process",
        line="op = CPUAdamBuilder().load()",
        when=op_conditions.zenflow,
    ),
    Load(
        op="fused_adam",
        file="ops/adam/fused_adam.py",
        function="FusedAdam.__init__",
        line="fused_adam_cuda = FusedAdamBuilder().load()",
        when=op_conditions.fused_adam,
    ),
    Load(
        op="fused_lamb",
        file="ops/lamb/fused_lamb.py",
        function="FusedLamb.__init__",
        line="self.fused_lamb_cuda = FusedLambBuilder().load()",
        when=op_conditions.fused_lamb,
    ),
    Load(
        op="fused_lion",
        file="ops/lion/fused_lion.py",
        function="FusedLion.__init__",
        line="fused_lion_cuda = FusedLionBuilder().load()",
        when=op_conditions.fused_lion,
    ),
    Load(
        op="cpu_lion",
        file="ops/lion/cpu_lion.py",
        function="DeepSpeedCPULion.__init__",
        line="self.ds_opt_lion = CPULionBuilder().load()",
        when=op_conditions.cpu_lion,
    ),
    Load(
        op="cpu_adagrad",
        file="ops/adagrad/cpu_adagrad.py",
        function="DeepSpeedCPUAdagrad.__init__",
        line="self.ds_opt_adagrad = CPUAdagradBuilder().load()",
        when=op_conditions.cpu_adagrad,
    ),
    Load(
        op="async_io",
        file="runtime/swap_tensor/partitioned_param_swapper.py",
        function="AsyncPartitionedParameterSwapper._configure_aio",
        line="self.aio_handle = GDSBuilder().load(verbose=False).gds_handle if self.use_gds else AsyncIOBuilder().load(",
        when=op_conditions.parameters_on_nvme,
    ),
    Load(
        op="gds",
        file="runtime/swap_tensor/partitioned_param_swapper.py",
        function="AsyncPartitionedParameterSwapper._configure_aio",
        line="self.aio_handle = GDSBuilder().load(verbose=False).gds_handle if self.use_gds else AsyncIOBuilder().load(",
        when=op_conditions.parameters_on_nvme_by_gds,
    ),
    Load(
        op="async_io",
        file="runtime/swap_tensor/partitioned_optimizer_swapper.py",
        function="PartitionedOptimizerSwapper.__init__",
        line="aio_op = AsyncIOBuilder().load()",
        when=op_conditions.optimizer_on_nvme,
    ),
    Load(
        op="async_io",
        file="runtime/swap_tensor/pipelined_optimizer_swapper.py",
        function="PipelinedOptimizerSwapper.__init__",
        line="aio_op = AsyncIOBuilder().load()",
        when=op_conditions.optimizer_on_nvme_pipelined,
    ),
    Load(
        op="async_io",
        file="runtime/model_checkpointing/writer_factory.py",
        function="CheckpointWriterFactory._setup_for_aio",
        line="self._dnvme_handle = AsyncIOBuilder().load().aio_handle(",
        when=op_conditions.fast_writer_by_aio,
    ),
    Load(
        op="gds",
        file="runtime/model_checkpointing/writer_factory.py",
        function="CheckpointWriterFactory._setup_for_gds",
        line="self._dnvme_handle = GDSBuilder().load().gds_handle(block_size=aio_config[AIO_BLOCK_SIZE],",
        when=op_conditions.fast_writer_by_gds,
    ),
    Load(
        op="utils",
        file="io/fast_file_writer.py",
        function="FastFileWriter.__init__",
        line="self._cast_to_byte_tensor = UtilsBuilder().load().cast_to_byte_tensor",
        when=op_conditions.fast_writer,
    ),
    Load(
        op="pin_memory",
        file="ops/op_builder/async_io.py",
        function="AsyncIOBuilder.load",
        line="PinMemoryBuilder().load(verbose=verbose)",
        when=_any_file_by_aio,
        accelerators=("cuda",),
    ),
    Load(
        op="pin_memory",
        file="ops/op_builder/cpu/async_io.py",
        function="AsyncIOBuilder.load",
        line="PinMemoryBuilder().load(verbose=verbose)",
        when=_any_file_by_aio,
        accelerators=("cpu",),
    ),
    Load(
        op="quantizer",
        file="runtime/zero/partition_parameters.py",
        function="CUDAQuantizer.__init__",
        line="CUDAQuantizer.quantizer_cuda_module = deepspeed.ops.op_builder.QuantizerBuilder().load()",
        when=op_conditions.quantized_parameters,
    ),
    Load(
        op="quantizer",
        file="runtime/comm/coalesced_collectives.py",
        function="all_to_all_quant_reduce",
        line="quantizer_module = op_builder.QuantizerBuilder().load()",
        when=op_conditions.quantized_gradients,
    ),
    Load(
        op="quantizer",
        file="inference/quantization/utils.py",
        function="get_quantizer_module",
        line="quantizer_module = deepspeed.ops.op_builder.QuantizerBuilder().load()",
        when=op_conditions.quantized_layers,
        accelerators=("cuda",),
    ),
    Load(
        op="transformer_inference",
        file="ops/transformer/inference/op_binding/base.py",
        function="BaseOp.__init__",
        line="builder = InferenceBuilder()",
        when=op_conditions.inference_kernels,
    ),
    Load(
        op="dc",
        file="compile/util.py",
        function="get_deepcompile_handle",
        line="dc_handle = DeepCompileBuilder().load()",
        when=op_conditions.deepcompile,
    ),
    _random_ltd_site("gpt_sample_tokens"),
    _random_ltd_site("bert_sample_tokens"),
    _random_ltd_site("GatherTokens.forward"),
    _random_ltd_site("GatherTokens.backward"),
    _random_ltd_site("ScatterTokens.forward"),
    _random_ltd_site("ScatterTokens.backward"),
)

NOT_BY_CONFIG = (
    NotByConfig(place="inference/v2/", reason="the serving engine (FastGen), no training"),
    NotByConfig(place="nvme/", reason="DeepNVMe's measuring tools, started by hand"),
    NotByConfig(place="ops/op_builder/klxpu/", reason="another accelerator than CUDA and CPU"),
    NotByConfig(place="ops/op_builder/npu/", reason="another accelerator than CUDA and CPU"),
    NotByConfig(place="ops/op_builder/supa/", reason="another accelerator than CUDA and CPU"),
    NotByConfig(place="ops/op_builder/xpu/", reason="another accelerator than CUDA and CPU"),
    NotByConfig(
        place="comm/ccl.py", reason="where oneCCL's bindings for torch are installed, whatever the configuration"
    ),
    NotByConfig(
        place="utils/pin_memory.py", reason="where DS_PIN_MEMORY_BACKEND=native is set, whatever the configuration"
    ),
    NotByConfig(place="ops/deepspeed4science/", reason="the model's own code calls it"),
    NotByConfig(place="ops/fp_quantizer/", reason="the model's own code calls it (deepspeed.linear)"),
    NotByConfig(place="ops/transformer/transformer.py", reason="the model's own code makes DeepSpeedTransformerLayer"),
    NotByConfig(
        place="ops/transformer/inference/bias_add.py",
        reason="diffusion models under kernel injection: the model decides",
    ),
)
