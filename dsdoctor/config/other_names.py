"""Keys that are nobody's typing mistake: what others call the same thing. A table, and where it stands."""

from collections.abc import Mapping

from dsdoctor.config.answer import Path

ACCELERATE = ("accelerate", "utils/dataclasses.py")
TRAINER = ("transformers", "integrations/deepspeed.py")
ACCUMULATION = (("gradient_accumulation_steps",),)
PRECISIONS = (("bf16", "enabled"), ("fp16", "enabled"))

OTHER_NAMES: Mapping[Path, tuple[Path, ...]] = {
    ("aio", "thread_count"): (("aio", "intra_op_parallelism"),),
    ("aio", "num_threads"): (("aio", "intra_op_parallelism"),),
    ("tensorboard", "output_dir"): (("tensorboard", "output_path"),),
    ("tensorboard", "log_dir"): (("tensorboard", "output_path"),),
    ("tensorboard", "logdir"): (("tensorboard", "output_path"),),
    ("csv_monitor", "output_dir"): (("csv_monitor", "output_path"),),
    ("csv_monitor", "log_dir"): (("csv_monitor", "output_path"),),
    ("wandb", "entity"): (("wandb", "team"),),
    ("zero",): (("zero_optimization",),),
    ("zero_stage",): (("zero_optimization", "stage"),),
    ("offload_optimizer_device",): (("zero_optimization", "offload_optimizer", "device"),),
    ("offload_param_device",): (("zero_optimization", "offload_param", "device"),),
    ("offload_optimizer_nvme_path",): (("zero_optimization", "offload_optimizer", "nvme_path"),),
    ("offload_param_nvme_path",): (("zero_optimization", "offload_param", "nvme_path"),),
    ("zero3_save_16bit_model",): (("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),),
    ("max_grad_norm",): (("gradient_clipping",),),
    ("clip_grad",): (("gradient_clipping",),),
    ("grad_clip",): (("gradient_clipping",),),
    ("grad_accum_steps",): ACCUMULATION,
    ("accumulation_steps",): ACCUMULATION,
    ("accumulate_grad_batches",): ACCUMULATION,
    ("per_device_train_batch_size",): (("train_micro_batch_size_per_gpu",),),
    ("batch_size",): (("train_micro_batch_size_per_gpu",), ("train_batch_size",)),
    ("lr",): (("optimizer", "params", "lr"),),
    ("learning_rate",): (("optimizer", "params", "lr"),),
    ("weight_decay",): (("optimizer", "params", "weight_decay"),),
    ("optim",): (("optimizer",),),
    ("lr_scheduler",): (("scheduler",),),
    ("mixed_precision",): PRECISIONS,
    ("log_interval",): (("steps_per_print",),),
    ("logging_steps",): (("steps_per_print",),),
}
"""Key -> where DeepSpeed looks for that; several where it depends on what is meant."""

STANDS_IN: Mapping[str, tuple[str, str, str]] = {
    "entity": ("deepspeed", "monitor/wandb.py", "entity=self.team"),
    "zero_stage": (*ACCELERATE, '"zero_stage": "zero_optimization.stage"'),
    "offload_optimizer_device": (
        *ACCELERATE,
        '"offload_optimizer_device": "zero_optimization.offload_optimizer.device"',
    ),
    "offload_param_device": (*ACCELERATE, '"offload_param_device": "zero_optimization.offload_param.device"'),
    "offload_param_nvme_path": (*ACCELERATE, '"offload_param_nvme_path": "zero_optimization.offload_param.nvme_path"'),
    "offload_optimizer_nvme_path": (
        *ACCELERATE,
        '"offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path"',
    ),
    "zero3_save_16bit_model": (*ACCELERATE, "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    "max_grad_norm": (*TRAINER, '"max_grad_norm"'),
    "per_device_train_batch_size": (*TRAINER, "args.per_device_train_batch_size"),
    "learning_rate": (*TRAINER, '"learning_rate"'),
    "weight_decay": (*TRAINER, '"weight_decay"'),
}
"""For the names that another package gives: the package, its file, and the words there."""
