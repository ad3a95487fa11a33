"""A script of Hugging Face's Trainer on gloo without DeepSpeed, four steps. `--on RANK`: the data of that rank never come in the
third. `--evaluates RANK`: that one evaluates alone after the second. `--callback`: the script itself asks for the hang watch."""

import argparse
import tempfile
import time

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return {"loss": ((self.linear(x) - labels) ** 2).mean()}


class Numbers(torch.utils.data.Dataset):
    def __init__(self, stuck: bool) -> None:
        self.stuck, self.given = stuck, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.given += 1
        if self.stuck and self.given > 4:
            time.sleep(3600)
        return {"x": torch.ones(4), "labels": torch.zeros(1)}


class EvaluatesAlone(TrainerCallback):
    """As `if rank == 0: trainer.evaluate()` in a script's own loop."""

    def __init__(self, rank: int) -> None:
        self.rank, self.trainer = rank, None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and args.process_index == self.rank:
            self.trainer.evaluate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--on", type=int, default=-1)
    parser.add_argument("--evaluates", type=int, default=-1)
    parser.add_argument("--callback", action="store_true")
    given = parser.parse_args()
    callbacks = []
    if given.callback:
        import dsdoctor

        callbacks = [dsdoctor.HangCallback(after=4.0, on_hang="stop")]
    alone = EvaluatesAlone(given.evaluates)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=4,
            per_device_train_batch_size=2,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        data = Numbers(args.process_index == given.on)
        callbacks = [*callbacks, alone]
        alone.trainer = Trainer(model=Model(), args=args, train_dataset=data, eval_dataset=data, callbacks=callbacks)
        alone.trainer.train()


if __name__ == "__main__":
    main()
