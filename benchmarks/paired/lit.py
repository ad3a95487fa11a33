"""Lightning, on one process or two (which Lightning starts itself): lit.py [devices]."""

import sys

import lightning
import torch


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        loss = self.net(batch[0]).pow(2).mean()
        say(self.global_rank, index, loss.item().hex())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    lightning.seed_everything(3)
    devices = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(16, 4)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=devices == 1,
        default_root_dir="lit",
    )
    trainer.fit(Lit(), loader)
    say(trainer.global_rank, trainer.global_step)
