"""The manual pages of the findings on memory, in four parts (see ``dsdoctor.core.text``)."""

PAGES = {
    "memory-does-not-fit": """\
A rank's peak, as it is predicted from the configuration, the model and the batch, is larger than the memory of its
GPU.

Why it matters: the training ends with an out-of-memory error, in its first steps as a rule, and often after the model
was loaded and the data prepared.

How to fix it: take the first of the changes that dsdoctor memory lists which wins enough; they are in the order of
what they cost.

    $ dsdoctor memory --config ds_config.json --model MODEL --gpus 8x80G --search

Since: 0.1""",
    "sequence-exceeds-positions": """\
A sample has more tokens than the model has positions for. Positions that are rows of a table (GPT-2, OPT, BERT) end there, and
no training begins; those that are computed (Llama's) go on, beyond what the model was made for.

Why it matters: the lookup of a row that is not there ends the training with an index error, on a GPU with a device-side assert.

How to fix it: take no more tokens than that, or a model with more positions.

    $ dsdoctor memory --config ds_config.json --model MODEL --gpus 8x80G --sequence 1024

Since: 0.1""",
    "attention-kernel-decides": """\
The model calls scaled_dot_product_attention with dropout, or with a mask that is trained (T5's positions). What that takes
is decided by the kernel which torch chooses where it runs: a fused one keeps no scores, the plain one keeps every token's
score with every other, in several copies.

Why it matters: with long sequences the two are far apart, and one fits where the other does not. GPUs have fused kernels for
nearly all cases, so the smaller number is the likelier one there; CPUs have none for these.

How to fix it: set the dropout of attention to 0 (attn_pdrop, attention_dropout), which most recipes do; or measure a few steps:

    $ python -m dsdoctor.run --memory trace train.py

Since: 0.1""",
    "memory-fits-barely": """\
A rank's predicted tensors fit its GPU, but not together with all that may be beside them: the CUDA context, buffers
for communication, and what torch's allocator keeps without using it. These are ranges and were not measured.

Why it matters: whether the training runs depends on the machine, and it may end with an out-of-memory error after
hours, when the memory has become fragmented.

How to fix it: take one of the listed changes, or run a few steps first and look at torch.cuda.max_memory_reserved().

    $ python -m dsdoctor.run --memory trace train.py

Since: 0.1""",
    "host-memory-does-not-fit": """\
The ranks of one node together take more of the host's memory than it has: what is offloaded, and a checkpoint that
each rank loads for itself.

Why it matters: the kernel ends a process with SIGKILL (the log says -9 and nothing else), or the node swaps and each
step takes minutes.

How to fix it: offload less, use fewer ranks on a node, or load the checkpoint under deepspeed.zero.Init, which keeps
a part of each parameter on a rank.

    $ dsdoctor memory --config ds_config.json --model MODEL --gpus 8x80G --host-memory 2048G

Since: 0.1""",
    "reduce-bucket-exceeds-model": """\
The buffer in which gradients are collected before they are reduced (reduce_bucket_size, in elements) is larger than
all gradients of the model together.

Why it matters: ZeRO-3 allocates it in deepspeed.initialize and keeps it for good, ZeRO-1 and -2 in each backward
pass, twice where communication overlaps. The default of 500 million elements is 1 GB in bf16, 2 GB in fp32, and
DeepSpeed's estimators leave it out.

How to fix it: set it in the configuration, to no more than the model's trained parameters.

    $ dsdoctor memory --config ds_config.json --model MODEL --world 8

Since: 0.1""",
    "activations-not-told": """\
The model could not be followed with shapes alone, so activations are not known, and neither are the peaks of forward
and backward. What depends on numbers cannot be followed (a loop over the experts that tokens chose), nor what is
computed by kernels that torch knows nothing of.

Why it matters: activations are the largest part of many trainings. The ledger then holds states and buckets only, and
the real peak is higher.

How to fix it: name a function that returns the model in a form that torch can follow, or measure a few steps.

    $ dsdoctor memory --config ds_config.json --model train.py:make_model --world 8
    $ python -m dsdoctor.run --memory trace train.py

Since: 0.1""",
    "memory-part-not-followed": """\
The configuration uses something whose memory this ledger does not follow, or follows in a simpler form.

Why it matters: what is printed is then an approximation for that part, in either direction.

How to fix it: measure a few steps beside the prediction.

    $ python -m dsdoctor.run --memory trace train.py

Since: 0.1""",
    "configuration-left-auto": """\
Keys on which memory depends are "auto", and only the Trainer that reads the file fills them in. For buckets the
Trainer's formula was used where the model's hidden size is known, for the rest DeepSpeed's default.

Why it matters: the ledger is that of the values that were assumed.

How to fix it: say what will be used: --dtype, --batch, or the value in the file.

    $ dsdoctor memory --config ds_config.json --model MODEL --world 8 --dtype bf16 --batch 4

Since: 0.1""",
}
