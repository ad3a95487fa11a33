"""Run by the training's Python as one rank of a real world (gloo): deepspeed.initialize on the configuration of the argument."""

import json
import logging
import sys


def model():
    """Two linear layers with the names that DeepSpeed divides among ranks."""
    import torch

    layer = torch.nn.Module()
    layer.__class__ = type("Layer", (torch.nn.Module,), {})
    layer.self_attn, layer.input_layernorm = torch.nn.Module(), torch.nn.LayerNorm(96)
    layer.self_attn.q_proj, layer.self_attn.o_proj = torch.nn.Linear(96, 96), torch.nn.Linear(96, 96)
    made = torch.nn.Module()
    made.__class__ = type("TinyModel", (torch.nn.Module,), {})
    made.layers = torch.nn.ModuleList([layer])
    return made


def main():
    logging.disable(logging.CRITICAL)
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    deepspeed.initialize(
        config=json.loads(sys.argv[1]), model=made, model_parameters=made.parameters(), optimizer=optimizer
    )
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
