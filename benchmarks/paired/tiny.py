"""A tiny causal model, a tokenizer and rows, made from nothing."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(29)]


def model(seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=32, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1, pad_token_id=0
    )
    return GPT2LMHeadModel(config)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sentences(n=16):
    return [" ".join(f"w{(i * 7 + j) % 29}" for j in range(6)) for i in range(n)]
