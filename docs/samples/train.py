import time

import deepspeed
import torch


class Loader:
    """Batches; rank 1 waits for its sixth for an hour."""

    def __iter__(self):
        for number in range(20):
            if number == 5 and torch.distributed.get_rank() == 1:
                time.sleep(3600)
            yield torch.ones(2, 8) * number


deepspeed.init_distributed("gloo", verbose=False)
model = torch.nn.Linear(8, 8)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
for batch in Loader():
    engine.backward(engine(batch).mean())
    engine.step()
