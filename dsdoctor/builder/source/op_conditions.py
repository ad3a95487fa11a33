"""Configuration of a training -> why it loads an op, in words of the configuration, or "" where it does not. Pure."""

from dsdoctor.builder.source.training_config import TrainingConfig


def any_training(_: TrainingConfig) -> str:
    return "every training on a CPU"


def cpu_adam(config: TrainingConfig) -> str:
    device = f"offload_optimizer on {config.optimizer_device}"
    if config.stage == 3 and config.super_offload:
        return "super_offload"
    if not config.on_host:
        return ""
    if config.optimizer in {"adam", "adamw", "muon"} and not config.torch_adam:
        return f"optimizer {config.optimizer} with {device}"
    if not config.optimizer and config.own_cpu_optimizer:
        return f"{device} without an optimizer: DeepSpeed takes the program's own only where it is its own for the CPU"
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
    return "stage 3 with zero_quantized_gradients, on more than one node" if wanted else ""


def quantized_layers(config: TrainingConfig) -> str:
    return "weight_quantization" if config.quantized_layers else ""


def inference_kernels(config: TrainingConfig) -> str:
    if config.hybrid_engine:
        return "hybrid_engine"
    return "replace_with_kernel_inject" if config.kernel_injection else ""


def deepcompile(config: TrainingConfig) -> str:
    wanted = config.deepcompile and config.stage > 0 and not config.parallel_pass
    return "compile.deepcompile, once the program calls engine.compile()" if wanted else ""


def random_ltd(config: TrainingConfig) -> str:
    return "random_ltd" if config.random_ltd else ""
