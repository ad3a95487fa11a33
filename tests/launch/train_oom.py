"""A training of a small Llama that runs out of memory in the forward pass of its third step; knows nothing of dsdoctor."""

import deepspeed
import torch
import transformers

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 200_000},
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
}


def train() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=503, use_cache=False))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=CONFIG)

    def too_much(*_: object) -> None:
        if engine.global_steps == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 65536 bytes.")

    engine.module.lm_head.register_forward_hook(too_much)
    tokens = torch.zeros(4, 96, dtype=torch.long)
    for _ in range(3):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        del loss


if __name__ == "__main__":
    train()
