"""An unmodified Hugging Face Trainer script: a tiny GPT-2 built from a configuration, three steps, DeepSpeed by ZERO.

PLANT=MODULE in the environment multiplies that module's output by 1e38, twice, from step 2 on: it overflows there, inside
its forward. PLANT_RANK=N: on that rank only. ZERO=none: without DeepSpeed. DEBUG_OPTION: of TrainingArguments.
"""

import json
import os
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

ZERO = os.environ.get("ZERO", "2")
PRECISION = {"bf16": {"enabled": True}} if os.environ.get("BF16") else {}
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 0 if ZERO == "none" else int(ZERO)},
    # Trainer's own optimizer: DeepSpeed's would compile an op
    "zero_allow_untested_optimizer": True,
    **PRECISION,
}


class Tokens(torch.utils.data.Dataset):
    """Token sequences made of nothing but their number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Plant(TrainerCallback):
    """Breaks a module when a step begins."""

    def __init__(self, name: str, rank: str, step: int) -> None:
        self.name = name
        self.rank = rank
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if self.name and state.global_step == self.step and self.rank in {"", str(args.process_index)}:
            module = model.get_submodule(self.name)
            forward = module.forward
            # not by a hook: hooks of others would run before it, and see a healthy output
            module.forward = lambda *inputs, **named: forward(*inputs, **named) * 1e38 * 1e38


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=2,
            deepspeed=None if ZERO == "none" else CONFIG,
            debug=os.environ.get("DEBUG_OPTION", ""),
            use_cpu=True,
            bf16=bool(PRECISION),
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        plant = Plant(os.environ.get("PLANT", ""), os.environ.get("PLANT_RANK", ""), step=2)
        trainer = Trainer(model=model, args=args, train_dataset=Tokens(), callbacks=[plant])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    saw = {"rank": args.process_index, "world": args.world_size, "argv": sys.argv[1:], "losses": len(losses)}
    saw |= {"engine": type(trainer.model_wrapped).__name__}
    if ZERO != "none":
        saw |= {"stage": trainer.model_wrapped.zero_optimization_stage()}
    os.write(1, f"SAW {json.dumps(saw)}\n".encode())


if __name__ == "__main__":
    main()
