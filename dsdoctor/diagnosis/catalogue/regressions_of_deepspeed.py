"""What releases of DeepSpeed broke. A row holds only what its threads say."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.catalogue.regression import Regression
from dsdoctor.diagnosis.models import Tier

OF_DEEPSPEED = (
    Regression(
        package="deepspeed",
        broken="0.16.5",
        first="0.16.5",
        last="0.16.9",
        what="ZeRO-3's backward hooks look for ds_grads_remaining on modules that were changed after the start "
        "(LoRA, Liger)",
        cure="0.16.4 works; take it, or a release newer than 0.16.5",
        sources=("deepspeedai/DeepSpeed/issues/7203", "linkedin/Liger-Kernel/issues/480"),
        words="ds_grads_remaining",
        pattern=r"AttributeError: '\w{1,80}' object has no attribute 'ds_grads_remaining'",
        sample="AttributeError: 'Linear' object has no attribute 'ds_grads_remaining'",
        steps=(step("python -m pip install deepspeed==0.16.4"), instead("python -m pip install -U deepspeed")),
    ),
    Regression(
        package="deepspeed",
        broken="0.15.0 and newer with transformers before 4.46.1",
        first="0.15.0",
        what="transformers writes stage3_prefetch_bucket_size as a number with a fraction, and DeepSpeed takes "
        "whole numbers only",
        cure="mended in transformers 4.46.1; DeepSpeed 0.14.5 takes it",
        sources=("deepspeedai/DeepSpeed/issues/6525", "huggingface/transformers/pull/33402"),
        words="validation+error errors+validation",
        pattern=r"validation errors? for DeepSpeedZeroConfig stage3_prefetch_bucket_size Input should be a "
        r"valid integer, got a number "
        r"with a fractional part",
        sample="pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig\n"
        "stage3_prefetch_bucket_size\n"
        "  Input should be a valid integer, got a number with a fractional part [type=int_from_float, "
        "input_value=15099494.4]",
        steps=(
            step("python -m pip install -U 'transformers>=4.46.1'"),
            instead("python -m pip install deepspeed==0.14.5"),
        ),
    ),
    Regression(
        package="deepspeed",
        broken="0.14.1 to about 0.14.3",
        first="0.14.1",
        last="0.14.99",
        what="ZeRO-3 with CPU offload: unscale_and_clip_grads mixes tensors of the GPU and the CPU",
        cure="0.14.0 works; take it, or a release newer than 0.14",
        sources=(
            "deepspeedai/DeepSpeed/issues/5538",
            "deepspeedai/DeepSpeed/issues/5634",
            "hiyouga/LlamaFactory/issues/3583",
        ),
        words="tensors+device",
        pattern=r"RuntimeError: Expected all tensors to be on the same device, but found at least two devices",
        after=r"in unscale_and_clip_grads",
        sample='  File "/venv/deepspeed/runtime/zero/stage3.py", line 2030, in unscale_and_clip_grads\n'
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        steps=(step("python -m pip install -U deepspeed"), instead("python -m pip install deepspeed==0.14.0")),
    ),
    Regression(
        package="deepspeed",
        broken="0.10.1",
        first="0.10.1",
        last="0.10.1",
        what="ZeRO-2 with CPU offload and gradient accumulation asks for param.grad_accum, which is None",
        cure="0.10.0 works, and a release after 0.10.1 mends it (pull request 4214); or set gradient_accumulation_steps 1, or "
        "no offload_optimizer",
        sources=("deepspeedai/DeepSpeed/issues/4183", "deepspeedai/DeepSpeed/issues/4188"),
        words="nonetype+data",
        pattern=r"^AttributeError: 'NoneType' object has no attribute 'data'",
        after=r"async_accumulate_grad_in_cpu_via_gpu|grad_accum\.data",
        sample="    param.grad_accum.data.view(-1).add_(dest_buffer)\n"
        "AttributeError: 'NoneType' object has no attribute 'data'",
        steps=(step("python -m pip install -U deepspeed"), instead("python -m pip install deepspeed==0.10.0")),
    ),
    Regression(
        package="deepspeed",
        broken="0.18 before pull request 7841 (February 2026), with torch 2.3 or 2.4",
        first="0.18.0",
        what="it counts the used parameters in the backward pass with a function of torch that these torch versions do not "
        "run in a hook without gradients (next_functions of None)",
        cure="a newer torch, a DeepSpeed with pull request 7841 (after 0.18.6), or DeepSpeed 0.17",
        sources=("deepspeedai/DeepSpeed/pull/7841", "dexmal/dexbotic/issues/66"),
        words="next_functions",
        pattern=r"AttributeError: 'NoneType' object has no attribute 'next_functions'",
        after=r"count_used_parameters_in_backward",
        sample='  File "/venv/deepspeed/runtime/utils.py", line 1330, in count_used_parameters_in_backward\n'
        "AttributeError: 'NoneType' object has no attribute 'next_functions'",
        steps=(step("python -m pip install -U deepspeed"), instead("python -m pip install 'deepspeed<0.18'")),
    ),
    Regression(
        package="deepspeed",
        broken="0.18 with torch before 2.3",
        first="0.18.0",
        what="it counts the used parameters in the backward pass with functions that this torch does not have",
        cure="torch 2.3 or newer, or DeepSpeed 0.17",
        sources=("deepspeedai/DeepSpeed/issues/7756", "deepspeedai/DeepSpeed/pull/7849"),
        words="count_used_parameters_in_backward",
        pattern=r"count_used_parameters_in_backward requires internal PyTorch APIs",
        sample="AssertionError: count_used_parameters_in_backward requires internal PyTorch APIs that are not available in this "
        "PyTorch build.",
        steps=(step("python -m pip install -U torch"), instead("python -m pip install 'deepspeed<0.18'")),
    ),
    Regression(
        package="deepspeed",
        broken="0.9.3",
        first="0.9.3",
        last="0.9.3",
        what="zero.Init broadcasts parameters that are still on the CPU",
        cure="0.9.2 works; take it, or a newer release",
        sources=("deepspeedai/DeepSpeed/issues/3678", "huggingface/transformers/issues/24040"),
        words="tensors+device",
        pattern=r"RuntimeError: (?:Expected all tensors to be on the same device, but found at least two devices"
        r"|Tensors must be CUDA and dense)",
        after=r"in _post_init_method|in _zero_init_param",
        needs_version=True,
        sample="[INFO] DeepSpeed info: version=0.9.3, git-hash=unknown\n"
        '  File "/venv/deepspeed/runtime/zero/partition_parameters.py", line 813, in _zero_init_param\n'
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        steps=(step("python -m pip install -U deepspeed"), instead("python -m pip install deepspeed==0.9.2")),
    ),
    Regression(
        package="deepspeed",
        broken="0.12.4 to 0.14.1",
        first="0.12.4",
        last="0.14.1",
        what="with ZeRO-1 or ZeRO-2 and overlap_comm gradients are reduced while they are still written: the loss is 0, the "
        "gradient norm nan or 1.0",
        cure="take 0.14.2 or newer (or 0.12.3), set overlap_comm false or use_multi_rank_bucket_allreduce false, or a larger "
        "reduce_bucket_size",
        sources=("deepspeedai/DeepSpeed/issues/5242", "deepspeedai/DeepSpeed/issues/5347"),
        words="loss+grad_norm",
        pattern=r"'loss': 0\.0, 'grad_norm': (?:nan|1\.0)\b",
        stages="12",
        sample="[INFO] DeepSpeed info: version=0.13.5, git-hash=unknown\n"
        "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1.99e-05, 'epoch': 0.01}",
        tier=Tier.GENERIC,
        needs_version=True,
        steps=(step("python -m pip install -U deepspeed"), instead("python -m pip install deepspeed==0.12.3")),
    ),
    Regression(
        package="deepspeed",
        broken="0.14.3",
        first="0.14.3",
        last="0.14.3",
        what="all gradients are zero, and the model learns nothing",
        cure="take a newer release, or 0.14.2",
        sources=("deepspeedai/DeepSpeed/issues/5692", "deepspeedai/DeepSpeed/pull/5613"),
        words="loss+grad_norm",
        pattern=r"'loss': \d{1,4}\.\d{1,20}, 'grad_norm': 0\.0\b",
        sample="[INFO] DeepSpeed info: version=0.14.3, git-hash=unknown\n"
        "{'loss': 1.42, 'grad_norm': 0.0, 'learning_rate': 1.99e-05, 'epoch': 0.01}",
        tier=Tier.GENERIC,
        needs_version=True,
        steps=(step("python -m pip install -U deepspeed"), instead("python -m pip install deepspeed==0.14.2")),
    ),
    Regression(
        package="deepspeed",
        broken="0.12.2",
        first="0.12.0",
        last="0.12.2",
        what="the loss is 0.0 at every step (pipeline engine, ZeRO-3 with the Trainer)",
        cure="0.11.1 works; take it, or a newer release",
        sources=("deepspeedai/DeepSpeed/issues/4661",),
        words="nan+loss",
        pattern=r"'loss': 0\.0, 'grad_norm': nan\b",
        sample="[INFO] DeepSpeed info: version=0.12.2, git-hash=unknown\n"
        "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1.99e-05, 'epoch': 0.01}",
        tier=Tier.GENERIC,
        needs_version=True,
        steps=(step("python -m pip install -U deepspeed"),),
    ),
    Regression(
        package="deepspeed",
        broken="0.13.2 with onnxruntime-training",
        first="0.13.2",
        what="the import runs in a circle through onnxruntime's ORTModule hooks",
        cure="0.13.1 works; a newer onnxruntime-training mends it; without onnxruntime-training it does not happen",
        sources=("deepspeedai/DeepSpeed/issues/5140", "ROCm/onnxruntime/pull/35"),
        words="partially+processgroup",
        pattern=r"partially initialized module 'deepspeed\.comm' has no attribute 'ProcessGroup'",
        sample="AttributeError: partially initialized module 'deepspeed.comm' has no attribute 'ProcessGroup' "
        "(most likely due to a circular import)",
        steps=(
            step("python -m pip install -U onnxruntime-training"),
            instead("python -m pip install deepspeed==0.13.1"),
        ),
    ),
    Regression(
        package="deepspeed",
        broken="0.15.4 with triton 3",
        first="0.15.0",
        what="its triton inference modules import each other in a circle (circular import)",
        cure="take a newer DeepSpeed version",
        sources=("deepspeedai/DeepSpeed/issues/7159", "OpenRLHF/OpenRLHF/issues/1001"),
        words="deepspeedtransformerinference",
        pattern=r"cannot import name 'DeepSpeedTransformerInference' from partially initialized module",
        sample="ImportError: cannot import name 'DeepSpeedTransformerInference' from partially initialized "
        "module 'deepspeed.model_implementations.transformers.ds_transformer' (most likely due to a circular "
        "import)",
        steps=(step("python -m pip install -U deepspeed"),),
    ),
    Regression(
        package="deepspeed",
        broken="0.16.0 and newer with an older trl",
        first="0.15.5",
        what="trl calls a private function of DeepSpeedZeRoOffload that was renamed",
        cure="a newer trl version mends it; DeepSpeed 0.15.4 still has the function",
        sources=("om-ai-lab/VLM-R1/issues/32",),
        words="_register_hooks_recursively",
        pattern=r"'DeepSpeedZeRoOffload' object has no attribute '_register_hooks_recursively'",
        sample="AttributeError: 'DeepSpeedZeRoOffload' object has no attribute '_register_hooks_recursively'",
        steps=(step("python -m pip install -U trl"), instead("python -m pip install deepspeed==0.15.4")),
    ),
    Regression(
        package="deepspeed",
        broken="before pull request 7531 (August 2025)",
        last="0.17.6",
        what="DeepSpeedCPULion counts as an optimizer of the script's own under ZeRO-Offload",
        cure="mended by pull request 7531; or set zero_force_ds_cpu_optimizer to false",
        sources=("deepspeedai/DeepSpeed/issues/7524",),
        words="cpu_lion+offload",
        pattern=r"You are using ZeRO-Offload with a client provided optimizer \(<class .deepspeed\.ops\.lion",
        sample="deepspeed.runtime.zero.utils.ZeRORuntimeException: You are using ZeRO-Offload with a client "
        "provided optimizer (<class 'deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion'>) which in most cases will "
        "yield poor performance.",
        steps=(step("python -m pip install -U deepspeed"),),
    ),
    Regression(
        package="deepspeed",
        broken="before pull request 5318 (March 2024)",
        last="0.14.0",
        what="--ssh_port fails with the pdsh launcher",
        cure="mended by pull request 5318; or export PDSH_SSH_ARGS_APPEND, even empty",
        sources=("deepspeedai/DeepSpeed/pull/5318",),
        words="keyerror+pdsh_ssh_args_append",
        pattern=r"^KeyError: 'PDSH_SSH_ARGS_APPEND'",
        sample="KeyError: 'PDSH_SSH_ARGS_APPEND'",
        steps=(step("python -m pip install -U deepspeed"), instead("export PDSH_SSH_ARGS_APPEND=")),
    ),
    Regression(
        package="deepspeed",
        broken="before pull request 8142 (July 2026)",
        what="WarmupCosineLR divides by zero when total_num_steps equals warmup_num_steps",
        cure="mended by pull request 8142; or make total_num_steps larger than warmup_num_steps",
        sources=("deepspeedai/DeepSpeed/pull/8142",),
        words="zerodivisionerror",
        pattern=r"^ZeroDivisionError: (?:float )?division by zero",
        after=r"self\.total_num_steps - self\.warmup_num_steps",
        sample="    ratio = real_last_step / (self.total_num_steps - self.warmup_num_steps)\n"
        "ZeroDivisionError: float division by zero",
        steps=(step("python -m pip install -U deepspeed"),),
    ),
    Regression(
        package="deepspeed",
        broken="0.10.0 and newer with tortoise-tts",
        first="0.10.0",
        what="DeepSpeedGPTInference has no dtype any more",
        cure="0.8.3, which tortoise-tts pins, works",
        sources=("neonbjb/tortoise-tts/issues/546",),
        words="deepspeedgptinference",
        pattern=r"'DeepSpeedGPTInference' object has no attribute 'dtype'",
        sample="AttributeError: 'DeepSpeedGPTInference' object has no attribute 'dtype'. Did you mean: 'type'?",
        steps=(step("python -m pip install deepspeed==0.8.3"),),
    ),
    Regression(
        package="deepspeed",
        broken="0.4.0 with an old packaging",
        first="0.4.0",
        what="deepspeed asks packaging's Version for names that an old packaging has not",
        cure="upgrade packaging",
        sources=("deepspeedai/DeepSpeed/issues/1159",),
        words="major+version",
        pattern=r"AttributeError: 'Version' object has no attribute 'major'",
        after=r"deepspeed[/\\]__init__\.py|_parse_version",
        sample='  File "/venv/deepspeed/__init__.py", line 36, in _parse_version\n'
        "AttributeError: 'Version' object has no attribute 'major'",
        steps=(step("python -m pip install -U packaging"),),
    ),
)
