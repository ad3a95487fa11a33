"""Values that Hugging Face's Trainer fills in where a configuration says "auto" (transformers/integrations/deepspeed.py,
HfTrainerDeepSpeedConfig.trainer_config_finalize), as far as memory depends on them."""

from dataclasses import replace

from dsdoctor.memory.models import ZeroSettings

ZERO = "zero_optimization."


def filled(settings: ZeroSettings, hidden_size: int | None) -> ZeroSettings:
    """The settings with the Trainer's values for buckets and thresholds. Others keep DeepSpeed's defaults."""
    if hidden_size is None:
        return settings
    values = {
        "reduce_bucket_size": (ZERO + "reduce_bucket_size", hidden_size * hidden_size),
        "prefetch_bucket_size": (ZERO + "stage3_prefetch_bucket_size", int(0.9 * hidden_size * hidden_size)),
        "param_persistence_threshold": (ZERO + "stage3_param_persistence_threshold", 10 * hidden_size),
    }
    chosen = {field: value for field, (key, value) in values.items() if key in settings.automatic}
    return replace(settings, **chosen)  # type: ignore[arg-type]
