"""Every signature matches its own sample and no other rule's; every rule can be said; the ids are for good."""

import re

from dsdoctor.core.manual import parse_page
from dsdoctor.diagnosis.catalogue.rules import RULES, TOPICS
from dsdoctor.diagnosis.diagnose import diagnose
from dsdoctor.diagnosis.models import Facts, Hit, Signature, Tier
from dsdoctor.diagnosis.scan import scan
from dsdoctor.diagnosis.templates import fill, values_of

IDS = [
    "accelerate-config-twice",
    "accelerate-engine-missing",
    "accelerate-launch-incomplete",
    "accelerate-rtx-4000",
    "accelerate-several-models",
    "accelerate-state-missing",
    "accelerator-autodetect-cpu",
    "accelerator-name-invalid",
    "account-without-home",
    "activations-recomputed-differ",
    "arch-list-empty",
    "arch-parse-bug",
    "argument-not-known",
    "arguments-refused",
    "attention-not-known",
    "autocast-outside",
    "backward-twice",
    "bitsandbytes-kernel-failed",
    "bitsandbytes-unloadable",
    "cccl-headers-moved",
    "checkpoint-damaged",
    "checkpoint-not-found",
    "checkpoint-not-gathered",
    "checkpoint-not-written",
    "checkpoint-of-other-device",
    "checkpoint-other-model",
    "checkpoint-shard-missing",
    "checkpoint-tag-differs",
    "checkpoint-universal",
    "checkpoint-weights-only",
    "checkpoint-world-size",
    "collectives-differ",
    "command-not-found",
    "compiler-oom-killed",
    "config-auto-left",
    "config-batch-size-missing",
    "config-batch-sizes",
    "config-block-wrong",
    "config-file-missing",
    "config-file-unreadable",
    "config-key-unknown",
    "config-value-wrong",
    "container-not-started",
    "container-without-driver",
    "cpu-isa-illegal-instruction",
    "cublas-out-of-memory",
    "cuda-header-missing",
    "cuda-home-wrong",
    "cuda-lib-link-missing",
    "cuda-runtime-lib-missing",
    "cuda-toolkit-missing",
    "cuda-torch-mismatch",
    "cutlass-missing",
    "cxx-standard-too-low",
    "data-worker-failed",
    "data-worker-gone",
    "dataloader-options",
    "dataset-columns",
    "dataset-empty",
    "dataset-unreadable",
    "deepspeed-not-initialized",
    "deepspeed-setup-bug",
    "deepspeed-too-old-for-torch",
    "device-number-negative",
    "devices-mixed",
    "disk-full",
    "dispatch-batches-differ",
    "driver-missing",
    "driver-silent",
    "driver-too-old",
    "dtypes-differ",
    "engine-attribute-missing",
    "file-hides-package",
    "file-missing",
    "file-system-fails",
    "file-without-key",
    "flash-attention-dtype",
    "flash-attention-needs-ampere",
    "flash-attention-unavailable",
    "folder-read-only",
    "foreign-extension-mismatch",
    "foreign-extension-missing",
    "fp16-loss-scale-floor",
    "fsdp-layer-missing",
    "gds-link",
    "generations-do-not-divide",
    "git-unreachable",
    "glibc-too-old-for-package",
    "gpu-arch-unknown-to-torch",
    "gpu-arch-unsupported-by-nvcc",
    "gpu-assert",
    "gpu-busy",
    "gpu-hardware-error",
    "gpu-illegal-access",
    "gpu-index-out-of-range",
    "gpu-oom",
    "gpu-ordinal-invalid",
    "gpu-too-old-for-op",
    "gradient-none",
    "half-on-the-cpu",
    "hf-config-mismatch",
    "hf-hub-refused",
    "hf-hub-unreachable",
    "hf-model-type-unknown",
    "hf-model-under-zero3",
    "hf-quantized-under-zero3",
    "host-compiler-missing",
    "host-compiler-too-new",
    "host-compiler-too-old",
    "host-files-differ",
    "host-name-unresolved",
    "host-ram-oom",
    "hostfile-malformed",
    "image-tokens-differ",
    "job-preempted",
    "job-time-limit",
    "known-regression",
    "launch-local-rank-argument",
    "launch-option-wrong",
    "launch-ranks-contradict",
    "launch-script-missing",
    "launcher-backend-missing",
    "libaio-missing",
    "libaio-too-old",
    "libc-headers-missing",
    "libcuda-stub-missing",
    "libstdcxx-too-old",
    "lightning-refused",
    "logger-refused",
    "lora-targets-missing",
    "loss-without-gradient",
    "masked-jit-failure",
    "master-address-empty",
    "master-port-in-use",
    "memlock-limited",
    "meta-tensors-left",
    "model-code-not-trusted",
    "model-files-missing",
    "model-not-wrapped",
    "model-parallel-beside",
    "model-path-wrong",
    "model-spread-by-device-map",
    "moe-expert-parallel-size",
    "moe-parameter-groups",
    "moe-too-few-tokens",
    "moe-zero-stage",
    "mpi-program-missing",
    "mpi-root-refused",
    "name-not-in-package",
    "nccl-call-failed",
    "nccl-collective-timeout",
    "nccl-duplicate-gpu",
    "nccl-invalid-usage",
    "nccl-network-interface",
    "nccl-out-of-memory",
    "nccl-peer-access",
    "nccl-shm-too-small",
    "ninja-missing",
    "no-kernel-image",
    "no-launcher-env",
    "nofile-low",
    "not-under-slurm",
    "notebook-launch",
    "numa-right-missing",
    "numactl-missing",
    "numpy-changed",
    "nvcc-gcc11-bug",
    "nvme-file-short",
    "nvme-path-missing",
    "nvme-path-unusable",
    "nvme-swap-buffers",
    "nvme-swapped-twice",
    "oneccl-header-missing",
    "op-silently-skipped",
    "openmp-twice",
    "ops-torch-version-mismatch",
    "optimizer-missing",
    "optimizer-nothing-to-train",
    "optimizer-offload-client",
    "optimizer-other-parameters",
    "optimizer-states-do-not-fit",
    "optimizer-twice",
    "optimizer-unknown",
    "optimizer-untested",
    "output-not-empty",
    "package-argument-missing",
    "package-asked-for",
    "package-name-missing",
    "package-version-bound",
    "pad-token-missing",
    "permission-missing",
    "pinned-memory-failed",
    "pip-cannot-uninstall",
    "pip-certificate",
    "pip-compiler-missing",
    "pip-environment-protected",
    "pip-global-option-removed",
    "pip-hash-mismatch",
    "pip-network",
    "pip-no-matching-version",
    "pip-other-wheel-failed",
    "pip-permission",
    "pip-proxy",
    "pip-requirements-missing",
    "pip-resolution-impossible",
    "pip-wrong-python",
    "pipeline-batch",
    "pipeline-called-directly",
    "pipeline-module",
    "pipeline-stages",
    "pipeline-tensor-without-gradient",
    "pipeline-tensors",
    "pipeline-zero-stage",
    "pod-not-placed",
    "precision-apex-removed",
    "precision-fp16-and-bf16",
    "precision-unsupported",
    "process-start-method",
    "protobuf-too-new",
    "pydantic-incompatible",
    "python-dep-missing",
    "python-headers-missing",
    "quantized-model-moved",
    "quantized-types-differ",
    "quantized-without-adapter",
    "ray-worker-died",
    "reference-model-under-zero3",
    "rendezvous-closed",
    "resource-filter-invalid",
    "rl-batch-not-even",
    "samples-differ-in-size",
    "sampling-from-nan",
    "scheduler-parameters",
    "script-not-startable",
    "script-syntax",
    "shapes-differ",
    "shell-not-set-up",
    "simd-flag-mismatch",
    "slots-not-numbers",
    "slurm-refused",
    "ssh-unreachable",
    "stale-jit-cache",
    "temporary-folder-missing",
    "tensors-not-contiguous",
    "text-encoding-wrong",
    "tokenizer-package-missing",
    "torch-abi-mismatch",
    "torch-extensions-permission",
    "torch-libraries-mixed",
    "torch-missing-at-build",
    "torch-without-cuda",
    "torch-without-nccl",
    "torchrun-without-gpu",
    "trainer-data-missing",
    "trainer-metric-missing",
    "trainer-of-other-release",
    "triton-cannot-compile",
    "triton-pin-conflict",
    "undefined-symbol-missing-link",
    "user-without-name",
    "vllm-device-missing",
    "weights-shared-on-save",
    "wheel-package-missing",
    "windows-library-unloadable",
    "windows-program-missing",
    "windows-symlink-privilege",
    "windows-unsupported-op",
    "zero-backward-called-directly",
    "zero-bucket-too-large",
    "zero-no-sync",
    "zero-plus-plus",
    "zero-reduced-twice",
    "zero-settings",
    "zero-to-fp32-failed",
    "zero-unused-parameters",
    "zero3-gathered-parameters",
    "zero3-mixed-tensors",
    "zero3-other-modules",
    "zero3-parameter-unknown",
    "zero3-partitioned-weight",
]

WORDINGS = [(rule, signature) for rule in RULES.values() for signature in rule.signatures]


def hit_of(signature: Signature) -> Hit:
    return next(hit for hit in scan(signature.sample.splitlines()).hits.values() if hit.signature is signature)


def test_the_rules_are_those_of_the_field() -> None:
    assert sorted(RULES) == IDS


def test_no_id_is_used_twice() -> None:
    assert sum(len(room.RULES) for room in TOPICS) == len(RULES)


def test_a_wording_matches_its_own_sample_and_no_other_rule_does() -> None:
    for rule, signature in WORDINGS:
        hits = scan(signature.sample.splitlines()).hits.values()

        assert signature in [hit.signature for hit in hits], (rule.id, signature.sample)
        assert {hit.rule.id for hit in hits} == {rule.id}, signature.sample


def test_the_texts_of_a_wording_can_be_filled_from_its_sample() -> None:
    for rule, signature in WORDINGS:
        hit = hit_of(signature)
        values = values_of(hit.groups, Facts(), hit.op)
        texts = [fill(signature.title or rule.title, values), fill(signature.fix or rule.fix, values)]
        commands = [step.filled(values).line for step in signature.steps or rule.steps]

        assert all(text and text[0] != " " for text in texts), rule.id
        if signature.tier < Tier.ECHO and rule.id != "op-silently-skipped":
            assert not [text for text in [*texts, *commands] if "(unknown)" in text], (rule.id, texts, commands)


def test_a_rule_has_a_manual_page_and_refers_to_rules_that_are() -> None:
    for rule in RULES.values():
        page = parse_page(rule.manual)
        assert 1 <= len(page.means.splitlines()) <= 8, rule.id
        assert 1 <= len(page.why.splitlines()) <= 4, rule.id
        assert (page.fix, page.since) == ("", ""), f"{rule.id}: the page takes both from the rule"
        assert set(rule.explained_by) <= set(RULES), rule.id


def test_a_cause_is_diagnosed_from_its_sample_alone() -> None:
    for rule, signature in WORDINGS:
        if signature.tier <= Tier.GENERIC:
            finding = diagnose(signature.sample.splitlines()).findings[0]

            assert finding.rule == rule.id
            assert finding.evidence[0].startswith(f"line {len(signature.sample.splitlines())}: "), rule.id


def test_patterns_have_no_unbounded_gap() -> None:
    for rule, signature in WORDINGS:
        patterns = signature.pattern + signature.unless + signature.after

        assert re.findall(r"(?<![\\\w])\.[*+]", patterns) == [], rule.id
