"""When a training loads which op: DeepSpeed's own call sites, each with the configuration under which it is reached.

A site has DeepSpeed's file, function and line as they are in VERSION; a test compares them with the installed source, which is
parsed and not run, so that a site that comes, goes or moves is seen. To add one, write one record in LOADS, whose ``when`` says why
a configuration loads the op, in words of the configuration ("" where it does not), or name its place in NOT_BY_CONFIG.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.builder.source.training_config import TrainingConfig
from dsdoctor.rules import book

VERSION = "0.19.8"
BOTH = ("cuda", "cpu")
MENTIONS = re.compile(r"Builder\s*\(|_op_builder\s*\(")
BY_NAME = {"create_op_builder", "get_op_builder"}
HARMLESS = {"is_compatible", "compatible_ops"}
When = Callable[[TrainingConfig], str]
"""Why a training with this configuration loads the op, in words of the configuration; "" where it does not."""


@dataclass(frozen=True, kw_only=True, order=True)
class LoadSite:
    """``file`` is relative to the package deepspeed, ``function`` its qualified name, ``line`` the text of the line."""

    file: str
    function: str
    op: str
    line: str


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


def ops_of_config(configs: Iterable[TrainingConfig], *, accelerator: str) -> dict[str, str]:
    """Each op with the reason, in a stable order. ``accelerator`` is "cuda" or "cpu".

    >>> list(ops_of_config([TrainingConfig(optimizer="adamw", stage=3, optimizer_device="cpu", param_device="nvme")],
    ...     accelerator="cuda"))
    ['async_io', 'cpu_adam', 'pin_memory']
    """
    found: dict[str, str] = {}
    for config in configs:
        for load in LOADS:
            reason = load.when(config) if accelerator in load.accelerators else ""
            if reason:
                found.setdefault(load.op, reason)
    return dict(sorted(found.items()))


def find_load_sites(tree: Path) -> tuple[LoadSite, ...]:
    """All sites, of every accelerator. ``tree`` holds the package deepspeed: a source tree, or a site-packages."""
    package = tree / "deepspeed"
    builders = builder_names(tree)
    found: set[LoadSite] = set()
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        if file.startswith("ops/op_builder/"):
            continue
        found.update(_sites(path, file, builders))
    for path in sorted(_op_builder(tree).rglob("*.py")):
        file = f"ops/op_builder/{path.relative_to(_op_builder(tree)).as_posix()}"
        found.update(_sites(path, file, builders))
    return tuple(sorted(found))


def unknown_sites(sites: Iterable[LoadSite]) -> tuple[LoadSite, ...]:
    """Those of a DeepSpeed that loads ops where the table knows of none: another version than it was written for."""
    known = {(load.file, load.function, load.op) for load in LOADS}
    return tuple(
        site
        for site in sites
        if (site.file, site.function, site.op) not in known and not site.file.startswith(NOT_BY_CONFIG)
    )


def builder_names(tree: Path) -> dict[str, str]:
    """Each class of op_builder that builds an op -> the op's name."""
    found: dict[str, str] = {}
    folder = _op_builder(tree)
    for path in sorted(folder.rglob("*.py"), key=lambda path: (len(path.parts), path)):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef) and (name := _op_name(node)):
                found.setdefault(node.name, name)
    return found


def _op_builder(tree: Path) -> Path:
    """In a source tree it stands beside the package, which has a link to it."""
    beside = tree / "op_builder"
    return beside if beside.is_dir() else tree / "deepspeed" / "ops" / "op_builder"


def _op_name(node: ast.ClassDef) -> str | None:
    for statement in node.body:
        if (
            isinstance(statement, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == "NAME" for target in statement.targets)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        ):
            return statement.value.value
    return None


def _sites(path: Path, file: str, builders: dict[str, str]) -> Iterator[LoadSite]:
    content = path.read_text(encoding="utf-8", errors="replace")
    if not MENTIONS.search(content):
        return
    lines = content.splitlines()
    for function, call in _calls(ast.parse(content), ()):
        op = _loaded(call, builders)
        if op is not None:
            yield LoadSite(file=file, function=".".join(function), op=op, line=lines[call.lineno - 1].strip())


def _calls(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.Call]]:
    """Every call with the names of the classes and functions around it, but for what is only asked whether it is compatible."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute) and child.attr in HARMLESS:
            continue
        named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.Call):
            yield inside, child
        yield from _calls(child, (*inside, child.name) if named else inside)  # type: ignore[attr-defined]


def _loaded(call: ast.Call, builders: dict[str, str]) -> str | None:
    """The op whose builder a call makes, or None."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if called in builders:
        return builders[called]
    if called in BY_NAME and call.args and isinstance(call.args[0], ast.Constant):
        return builders.get(str(call.args[0].value), str(call.args[0].value))
    return None


def any_training(_: TrainingConfig) -> str:
    return book.phrase("builder", "every-cpu-training")


def cpu_adam(config: TrainingConfig) -> str:
    device = f"offload_optimizer on {config.optimizer_device}"
    if config.stage == 3 and config.super_offload:
        return "super_offload"
    if not config.on_host:
        return ""
    if config.optimizer in {"adam", "adamw", "muon"} and not config.torch_adam:
        return f"optimizer {config.optimizer} with {device}"
    if not config.optimizer and config.own_cpu_optimizer:
        return book.phrase("builder", "offload-without-optimizer", device=device)
    return ""


def zenflow(config: TrainingConfig) -> str:
    return "zenflow with overlap_step" if config.zenflow_overlap and config.on_host else ""


def fused_adam(config: TrainingConfig) -> str:
    if config.optimizer in {"adam", "adamw", "muon"} and not config.torch_adam and not config.on_host:
        return f"optimizer {config.optimizer}"
    return ""


def fused_lamb(config: TrainingConfig) -> str:
    return "optimizer lamb" if config.optimizer == "lamb" else ""


def fused_lion(config: TrainingConfig) -> str:
    return "optimizer lion" if config.optimizer == "lion" and not config.on_host else ""


def cpu_lion(config: TrainingConfig) -> str:
    if config.optimizer == "lion" and config.on_host:
        return f"optimizer lion with offload_optimizer on {config.optimizer_device}"
    return ""


def cpu_adagrad(config: TrainingConfig) -> str:
    if config.optimizer == "adagrad" and config.on_host:
        return f"optimizer adagrad with offload_optimizer on {config.optimizer_device}"
    return ""


def parameters_on_nvme(config: TrainingConfig) -> str:
    wanted = config.stage == 3 and config.param_device == "nvme" and not config.use_gds
    return "stage 3 with offload_param on nvme" if wanted else ""


def parameters_on_nvme_by_gds(config: TrainingConfig) -> str:
    wanted = config.stage == 3 and config.param_device == "nvme" and config.use_gds
    return "stage 3 with offload_param on nvme and aio.use_gds" if wanted else ""


def optimizer_on_nvme(config: TrainingConfig) -> str:
    wanted = config.stage == 3 and config.optimizer_device == "nvme" and not config.pipelined
    return "stage 3 with offload_optimizer on nvme" if wanted else ""


def optimizer_on_nvme_pipelined(config: TrainingConfig) -> str:
    wanted = config.stage == 3 and config.optimizer_device == "nvme" and config.pipelined
    return "stage 3 with offload_optimizer on nvme" if wanted else ""


def fast_writer(config: TrainingConfig) -> str:
    return "checkpoint.writer" if config.writer == "FAST" else ""


def fast_writer_by_aio(config: TrainingConfig) -> str:
    return fast_writer(config) if not config.use_gds else ""


def fast_writer_by_gds(config: TrainingConfig) -> str:
    return f"{fast_writer(config)} with aio.use_gds" if fast_writer(config) and config.use_gds else ""


def quantized_parameters(config: TrainingConfig) -> str:
    if config.stage == 3 and config.quantized_weights:
        return "stage 3 with zero_quantized_weights"
    if config.stage == 3 and config.quantized_nontrainable:
        return "stage 3 with zero_quantized_nontrainable_weights"
    return ""


def quantized_gradients(config: TrainingConfig) -> str:
    wanted = config.stage == 3 and config.quantized_gradients
    return book.phrase("builder", "quantized-gradients") if wanted else ""


def quantized_layers(config: TrainingConfig) -> str:
    return "weight_quantization" if config.quantized_layers else ""


def inference_kernels(config: TrainingConfig) -> str:
    if config.hybrid_engine:
        return "hybrid_engine"
    return "replace_with_kernel_inject" if config.kernel_injection else ""


def deepcompile(config: TrainingConfig) -> str:
    wanted = config.deepcompile and config.stage > 0 and not config.parallel_pass
    return book.phrase("builder", "deepcompile") if wanted else ""


def random_ltd(config: TrainingConfig) -> str:
    return "random_ltd" if config.random_ltd else ""


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
        when=random_ltd,
    )


LOADS = (
    Load(
        op="deepspeed_shm_comm",
        file="comm/torch.py",
        function="build_shm_op",
        line='builder = get_accelerator().create_op_builder("ShareMemCommBuilder")',
        when=any_training,
        accelerators=("cpu",),
    ),
    Load(
        op="cpu_adam",
        file="ops/adam/cpu_adam.py",
        function="DeepSpeedCPUAdam.__init__",
        line="self.ds_opt_adam = CPUAdamBuilder().load()",
        when=cpu_adam,
    ),
    Load(
        op="cpu_adam",
        file="runtime/zenflow/zenflow_utils.py",
        function="start_optimizer_process",
        line="op = CPUAdamBuilder().load()",
        when=zenflow,
    ),
    Load(
        op="cpu_adam",
        file="runtime/zenflow/zenflow_utils.py",
        function="zenflow_optimizer_process",
        line="op = CPUAdamBuilder().load()",
        when=zenflow,
    ),
    Load(
        op="fused_adam",
        file="ops/adam/fused_adam.py",
        function="FusedAdam.__init__",
        line="fused_adam_cuda = FusedAdamBuilder().load()",
        when=fused_adam,
    ),
    Load(
        op="fused_lamb",
        file="ops/lamb/fused_lamb.py",
        function="FusedLamb.__init__",
        line="self.fused_lamb_cuda = FusedLambBuilder().load()",
        when=fused_lamb,
    ),
    Load(
        op="fused_lion",
        file="ops/lion/fused_lion.py",
        function="FusedLion.__init__",
        line="fused_lion_cuda = FusedLionBuilder().load()",
        when=fused_lion,
    ),
    Load(
        op="cpu_lion",
        file="ops/lion/cpu_lion.py",
        function="DeepSpeedCPULion.__init__",
        line="self.ds_opt_lion = CPULionBuilder().load()",
        when=cpu_lion,
    ),
    Load(
        op="cpu_adagrad",
        file="ops/adagrad/cpu_adagrad.py",
        function="DeepSpeedCPUAdagrad.__init__",
        line="self.ds_opt_adagrad = CPUAdagradBuilder().load()",
        when=cpu_adagrad,
    ),
    Load(
        op="async_io",
        file="runtime/swap_tensor/partitioned_param_swapper.py",
        function="AsyncPartitionedParameterSwapper._configure_aio",
        line="self.aio_handle = GDSBuilder().load(verbose=False).gds_handle if self.use_gds else AsyncIOBuilder().load(",
        when=parameters_on_nvme,
    ),
    Load(
        op="gds",
        file="runtime/swap_tensor/partitioned_param_swapper.py",
        function="AsyncPartitionedParameterSwapper._configure_aio",
        line="self.aio_handle = GDSBuilder().load(verbose=False).gds_handle if self.use_gds else AsyncIOBuilder().load(",
        when=parameters_on_nvme_by_gds,
    ),
    Load(
        op="async_io",
        file="runtime/swap_tensor/partitioned_optimizer_swapper.py",
        function="PartitionedOptimizerSwapper.__init__",
        line="aio_op = AsyncIOBuilder().load()",
        when=optimizer_on_nvme,
    ),
    Load(
        op="async_io",
        file="runtime/swap_tensor/pipelined_optimizer_swapper.py",
        function="PipelinedOptimizerSwapper.__init__",
        line="aio_op = AsyncIOBuilder().load()",
        when=optimizer_on_nvme_pipelined,
    ),
    Load(
        op="async_io",
        file="runtime/model_checkpointing/writer_factory.py",
        function="CheckpointWriterFactory._setup_for_aio",
        line="self._dnvme_handle = AsyncIOBuilder().load().aio_handle(",
        when=fast_writer_by_aio,
    ),
    Load(
        op="gds",
        file="runtime/model_checkpointing/writer_factory.py",
        function="CheckpointWriterFactory._setup_for_gds",
        line="self._dnvme_handle = GDSBuilder().load().gds_handle(block_size=aio_config[AIO_BLOCK_SIZE],",
        when=fast_writer_by_gds,
    ),
    Load(
        op="utils",
        file="io/fast_file_writer.py",
        function="FastFileWriter.__init__",
        line="self._cast_to_byte_tensor = UtilsBuilder().load().cast_to_byte_tensor",
        when=fast_writer,
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
        when=quantized_parameters,
    ),
    Load(
        op="quantizer",
        file="runtime/comm/coalesced_collectives.py",
        function="all_to_all_quant_reduce",
        line="quantizer_module = op_builder.QuantizerBuilder().load()",
        when=quantized_gradients,
    ),
    Load(
        op="quantizer",
        file="inference/quantization/utils.py",
        function="get_quantizer_module",
        line="quantizer_module = deepspeed.ops.op_builder.QuantizerBuilder().load()",
        when=quantized_layers,
        accelerators=("cuda",),
    ),
    Load(
        op="transformer_inference",
        file="ops/transformer/inference/op_binding/base.py",
        function="BaseOp.__init__",
        line="builder = InferenceBuilder()",
        when=inference_kernels,
    ),
    Load(
        op="dc",
        file="compile/util.py",
        function="get_deepcompile_handle",
        line="dc_handle = DeepCompileBuilder().load()",
        when=deepcompile,
    ),
    _random_ltd_site("gpt_sample_tokens"),
    _random_ltd_site("bert_sample_tokens"),
    _random_ltd_site("GatherTokens.forward"),
    _random_ltd_site("GatherTokens.backward"),
    _random_ltd_site("ScatterTokens.forward"),
    _random_ltd_site("ScatterTokens.backward"),
)
NOT_BY_CONFIG = (
    "inference/v2/",  # the serving engine (FastGen), no training
    "nvme/",  # DeepNVMe's measuring tools, started by hand
    "ops/op_builder/klxpu/",  # other accelerators than CUDA and CPU
    "ops/op_builder/npu/",
    "ops/op_builder/supa/",
    "ops/op_builder/xpu/",
    "comm/ccl.py",  # where oneCCL's bindings for torch are installed
    "utils/pin_memory.py",  # where DS_PIN_MEMORY_BACKEND=native is set
    "ops/deepspeed4science/",  # the model's own code calls it
    "ops/fp_quantizer/",  # the model's own code calls it (deepspeed.linear)
    "ops/transformer/transformer.py",  # the model's own code makes DeepSpeedTransformerLayer
    "ops/transformer/inference/bias_add.py",  # diffusion models under kernel injection: the model decides
)
"""Files and folders whose call sites no training configuration decides."""
