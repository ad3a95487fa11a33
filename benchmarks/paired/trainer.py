"""Hugging Face's Trainer: trainer.py [--stage N] [--bf16] [--resume] [--debug]."""

import argparse
import sys

import tiny
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=-1)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        ids = torch.tensor([(i * 5 + j) % 29 + 3 for j in range(8)])
        return {"input_ids": ids, "labels": ids}


class Prints(TrainerCallback):
    def on_log(self, arguments, state, control, logs=None, **others):
        if "loss" in logs:
            say(state.global_step, float(logs["loss"]).hex(), logs.get("grad_norm"), logs["learning_rate"])


def main(resume=False):
    set_seed(7)
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": args.stage},
        "bf16": {"enabled": args.bf16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        max_steps=6 if resume else 4,
        logging_steps=1,
        save_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        use_cpu=True,
        optim="adamw_torch",
        bf16=args.bf16,
        disable_tqdm=True,
        deepspeed=config if args.stage >= 0 else None,
    )
    trainer = Trainer(
        model=tiny.model(), args=arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Prints()]
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume or None)
    say(float(trainer.evaluate()["eval_loss"]).hex(), trainer.state.global_step)


if __name__ == "__main__":
    main()
    if args.resume:
        main(resume=True)
