"""Rules of what goes through a pipeline: the batches that it is given, and the tensors between its stages."""

from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

IN_THE_ENGINE = r"pipe[/\\]engine\.py"

PIPELINE_BATCH = Rule(
    id="pipeline-batch",
    stage=Stage.RUN,
    title="the pipeline engine was given a batch that is not of the form (inputs, labels) with tensors",
    fix="let the data loader give (inputs, labels), where each of the two is a tensor or a tuple of tensors; a "
    "dictionary, as Hugging Face collators make it, is not taken: write a collate_fn that returns such a pair",
    manual="""The first stage of a pipeline takes batch[0] as its inputs, the last stage batch[1] as its labels.

Both must be tensors, or tuples or lists of tensors: no dictionaries, no None, no plain numbers. train_batch takes
gradient_accumulation_steps micro batches from the iterator each time.

Why it matters: train_batch fails on the stages that load data, and the other stages wait for them.""",
    signatures=(
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"assert isinstance\(batch\[0\], (?:tuple|\(tuple, list\))\)",
            title="the inputs of a batch (batch[0]) are neither a tensor nor a tuple of tensors, as the pipeline needs",
            sample="    assert isinstance(batch[0], (tuple, list))\nAssertionError",
        ),
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"in _exec_load_micro_batch",
            title="an element of a batch for the pipeline is no tensor",
            sample='  File "/venv/deepspeed/runtime/pipe/engine.py", line 906, in _exec_load_micro_batch\n'
            "    assert torch.is_tensor(x)\nAssertionError",
        ),
        Signature(
            words="keyerror",
            pattern=r"^KeyError: [01]$",
            after=r"in _exec_load_micro_batch",
            title="the pipeline engine was given a batch that is a dictionary, and takes (inputs, labels) only",
            sample='  File "/venv/deepspeed/runtime/pipe/engine.py", line 893, in _exec_load_micro_batch\nKeyError: 0',
        ),
        Signature(
            words="stopiteration",
            pattern=r"^StopIteration$",
            after=r"pipe[/\\]engine\.py.{0,30}in _next_batch",
            title="the data iterator of the pipeline ended: train_batch takes gradient_accumulation_steps micro "
            "batches each time",
            fix="give train_batch an iterator that begins again (deepspeed.utils.RepeatingLoader(loader)), or stop "
            "while a whole batch is left",
            sample='  File "/venv/deepspeed/runtime/pipe/engine.py", line 691, in _next_batch\nStopIteration',
        ),
    ),
)

PIPELINE_SHAPES = Rule(
    id="pipeline-shapes",
    stage=Stage.RUN,
    title="the tensors between two pipeline stages have another shape than in the batches before ({what|a smaller "
    "last batch})",
    fix="give every micro batch the same shape: drop_last=True in the data loader and padding to one length; where "
    "shapes must differ, PipelineModule(..., dynamic_shape=True) in DeepSpeed 0.16 and newer",
    manual="""The stages of a pipeline exchange the shapes of their tensors once, and then send tensors of these shapes only.

The last batch of an epoch is smaller, or sequences differ in length, and a stage reads old rows in its buffer.

Why it matters: The loss or a backward fails on one stage, and the other stages wait for it.""",
    signatures=(
        Signature(
            words="expected+batch_size+target",
            pattern=r"^ValueError: Expected input batch_size \((?P<what>\d{1,9}\) to match target batch_size "
            r"\(\d{1,9})\)",
            after=IN_THE_ENGINE,
            sample='  File "/venv/deepspeed/runtime/pipe/engine.py", line 800, in _exec_forward_pass\n'
            "ValueError: Expected input batch_size (8) to match target batch_size (4).",
        ),
        Signature(
            words="mismatch+shape+grad_output",
            pattern=r"^RuntimeError: Mismatch in shape: grad_output\[\d\] has a shape of "
            r"torch\.Size\((?P<what>\[[\d, ]{1,40}\])\)",
            sample="RuntimeError: Mismatch in shape: grad_output[0] has a shape of torch.Size([8, 4096]) and "
            "output[0] has a shape of torch.Size([4, 4096]).",
        ),
        Signature(
            words="singleton+size+tensor",
            pattern=r"^RuntimeError: The size of tensor a \((?P<what>[1-9]\d{0,9}\) must match the size of tensor b "
            r"\([1-9]\d{0,9})\)",
            after=r"pipe[/\\](?:engine|module)\.py",
            tier=Tier.GENERIC,
            title="tensors of different size meet in a layer of the pipeline ({what}): micro batches differ in "
            "shape, or a layer gets another input than it was written for",
            sample='  File "/venv/deepspeed/runtime/pipe/module.py", line 389, in exec_func\n'
            "RuntimeError: The size of tensor a (64) must match the size of tensor b (32) at non-singleton dimension 2",
        ),
    ),
)

PIPELINE_TENSOR_WITHOUT_GRADIENT = Rule(
    id="pipeline-tensor-without-gradient",
    stage=Stage.RUN,
    title="a floating-point tensor that is passed between two pipeline stages got no gradient",
    fix="pass only what takes part in the loss with a gradient between layers: compute masks, position ids and "
    "rotary embeddings inside of each layer, or pass them as integers. If every tensor does need a gradient, try "
    "activation_checkpoint_interval=0 in the PipelineModule",
    manual="""A stage sends the gradients of all floating-point tensors that it got back to the stage before it.

A mask, rotary embeddings or a copy that was detached have no gradient, and reentrant activation checkpointing loses the
gradient of inputs that do not ask for one. Integer tensors are skipped.

Why it matters: The first backward fails on one stage, and the other stages wait for it.""",
    signatures=(
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"assert (?:buffer|inputs)\.grad is not None",
            sample="    assert buffer.grad is not None\nAssertionError",
        ),
        Signature(
            words="require+element+grad",
            pattern=r"^RuntimeError: element (?P<number>[1-9]\d{0,3}) of tensors does not require grad and does "
            r"not have a grad_fn",
            after=IN_THE_ENGINE,
            title="tensor {number} (counted from 0) of what a pipeline stage passes on has no gradient",
            sample='  File "/venv/deepspeed/runtime/pipe/engine.py", line 830, in _exec_backward_pass\n'
            "RuntimeError: element 1 of tensors does not require grad and does not have a grad_fn",
        ),
        Signature(
            words="argument+tensor+expected",
            pattern=r"^(?:TypeError|RuntimeError): Invalid function argument\. Expected parameter `tensor` (?:to be )?of type",
            after=r"_exec_reduce_tied_grads|allreduce_tied_weight_gradients",
            title="the tied weights of the pipeline (TiedLayerSpec) have no gradient to reduce: they are frozen, as under LoRA, or "
            "one of their stages does not use them",
            fix="let the tied layer be trainable (requires_grad), or take a newer DeepSpeed, which skips tied weights without a "
            "gradient (pull request 5477, after 0.14.2)",
            sample='  File "/venv/deepspeed/runtime/pipe/engine.py", line 276, in _exec_reduce_tied_grads\n'
            "TypeError: Invalid function argument. Expected parameter `tensor` of type torch.Tensor",
        ),
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"assert all\(\[torch\.is_tensor\(elt\) and elt\.requires_grad is False for elt in outputs\[1:\]\]\)",
            title="with pipe_partitioned only the first tensor between two stages may need a gradient",
            fix='set "pipe_partitioned": false in the block pipeline of the configuration, or pass one tensor with a '
            "gradient only, as the first one",
            sample="    assert all([torch.is_tensor(elt) and elt.requires_grad is False for elt in outputs[1:]])\n"
            "AssertionError",
        ),
    ),
)

PIPELINE_TENSORS = Rule(
    id="pipeline-tensors",
    stage=Stage.RUN,
    title="a layer of the pipeline passes on something else than a tensor or a tuple of tensors{kind_hint}",
    fix="let each layer take one argument and return one: a tensor, or a tuple of tensors; no dictionary, list, "
    "None or model output",
    manual="""What a layer returns is the one argument of the next layer, on the next stage after being sent.

Only tensors and tuples of tensors can be sent, and their shapes must fit into a small message.

Why it matters: The stage that sends fails, and the others wait for it.""",
    signatures=(
        Signature(
            words="send+type receive+type",
            pattern=r"NotImplementedError: Could not (?:send meta|send output of|receive) type (?P<kind>.{1,100}?)$",
            after=IN_THE_ENGINE,
            sample='  File "/venv/deepspeed/runtime/pipe/engine.py", line 1048, in _exec_send_activations\n'
            "NotImplementedError: Could not send output of type <class 'dict'>",
        ),
        Signature(
            words="tuple+attribute tensor+tuple+argument dict+attribute",
            pattern=r"^(?:AttributeError: '(?P<kind>tuple|list|dict)' object has no attribute '\w{1,40}'|TypeError: "
            r"\w{1,40}\(\): argument '\w{1,30}' (?:\(position \d\) )?must be Tensor, not "
            r"(?P<kind2>tuple|list|dict))",
            after=r"pipe[/\\](?:module|engine)\.py",
            title="a layer of the pipeline was given a {kind} where it expects a tensor: what a layer returns, or a "
            "batch holds, is the one argument of the next layer",
            sample='  File "/venv/deepspeed/runtime/pipe/module.py", line 389, in exec_func\n'
            "AttributeError: 'tuple' object has no attribute 'size'",
        ),
        Signature(
            words="nonetype+attribute",
            pattern=r"^(?:AttributeError: 'NoneType' object has no attribute "
            r"'(?:clone|detach|backward|item|float)'|AssertionError: 'NoneType')",
            after=r"in (?:_aggregate_total_loss|_scale_loss_by_gas|_exec_backward_pass)",
            title="the last pipeline stage has no loss: loss_fn is missing in the PipelineModule, or the last layer "
            "returns None",
            fix="give PipelineModule loss_fn=..., or let the last layer return the loss",
            sample='  File "/venv/deepspeed/runtime/pipe/engine.py", line 600, in _aggregate_total_loss\n'
            "AttributeError: 'NoneType' object has no attribute 'clone'",
        ),
        Signature(
            words="expecting+tensor+tuple",
            pattern=r"^ValueError: expecting a tensor or a tuple of tensors",
            after=IN_THE_ENGINE,
            sample='  File "/venv/deepspeed/runtime/pipe/engine.py", line 742, in _exec_forward_pass\n'
            "ValueError: expecting a tensor or a tuple of tensors",
        ),
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"in _send_tensor_meta",
            title="a tuple that is passed between two pipeline stages has an element that is no tensor",
            sample='  File "/venv/deepspeed/runtime/pipe/engine.py", line 964, in _send_tensor_meta\n'
            "    assert isinstance(tensor, torch.Tensor)\nAssertionError",
        ),
        Signature(
            words="buffer+metadata",
            pattern=r"AssertionError: Buffer for metadata is too small\. Current buffer size: \d{1,9} but required "
            r"(?P<size>\d{1,9})",
            title="too many tensors, or tensors of too many dimensions, are passed between two pipeline stages",
            fix="pass fewer tensors between layers: put several into one",
            sample="AssertionError: Buffer for metadata is too small. Current buffer size: 256 but required 301",
        ),
        Signature(
            words="typeerror+positional",
            pattern=r"^TypeError: (?:\w{1,80}\.)?forward\(\) missing (?P<kind>\d{1,2} required positional arguments?: "
            r".{1,100})",
            after=r"pipe[/\\]module\.py.{0,30}in exec_func",
            title="a layer of the pipeline takes several arguments, and gets one: a tuple{kind_hint}",
            fix="write forward(self, inputs) and take the tuple apart inside of it: hidden, mask = inputs",
            sample='  File "/venv/deepspeed/runtime/pipe/module.py", line 367, in exec_func\n'
            "TypeError: Block.forward() missing 1 required positional argument: 'attention_mask'",
        ),
    ),
)

PIPELINE_MODULE = Rule(
    id="pipeline-module",
    stage=Stage.RUN,
    title="the pipeline cannot be made as it is described{what_hint}",
    fix="give PipelineModule its layers as LayerSpec(Class, ...) or callables, and num_stages or a topology; "
    "partition_method is uniform, parameters or type:REGEX",
    manual="""A PipelineModule divides a list of layers among the stages; the engine then divides the ranks.

Each LayerSpec names a class of torch.nn.Module, and partition_method says how the layers are divided. The world size is
the number of stages times the data-parallel (and tensor-parallel) size.

Why it matters: The model, or its engine, cannot be made on any rank.""",
    signatures=(
        Signature(
            words="mpu+pipeline",
            pattern=r"AssertionError: mpu must be None with pipeline parallelism",
            title="deepspeed.initialize was given an mpu together with a PipelineModule, which has its own topology",
            fix="leave mpu out, and give the PipelineModule a topology with its model-parallel size "
            "(PipeModelDataParallelTopology)",
            sample="AssertionError: mpu must be None with pipeline parallelism",
        ),
        Signature(
            words="num_stages+topology",
            pattern=r"RuntimeError: must provide (?P<what>num_stages or topology)",
            title="PipelineModule was given neither num_stages nor a topology",
            sample="RuntimeError: must provide num_stages or topology",
        ),
        Signature(
            words="partitioning+method",
            pattern=r"NotImplementedError: Partitioning method (?P<what>\S{1,80}) not implemented",
            title="partition_method {what} does not exist",
            sample="NotImplementedError: Partitioning method balanced not implemented.",
        ),
        Signature(
            words="dualpipev",
            pattern=r"^(?:Assertion|Value)Error: DualPipeV (?P<what>(?:needs|does not support|cannot|exchanges) "
            r".{1,120})",
            title="DualPipeV {what}",
            fix="change that setting, or use the ordinary PipelineModule",
            sample="AssertionError: DualPipeV needs gradient_accumulation_steps >= 2 * 4, got 4",
        ),
        Signature(
            words="layerspec",
            pattern=r"RuntimeError: LayerSpec only supports torch\.nn\.Module types",
            title="a LayerSpec was given something else than a class of torch.nn.Module (a module that exists already?)",
            sample="RuntimeError: LayerSpec only supports torch.nn.Module types.",
        ),
        Signature(
            words="base+pipelinemodule base+dualpipevmodule",
            pattern=r"AssertionError: model must base (?P<what>PipelineModule|DualPipeVModule)",
            title="this engine needs a {what}, and was given another model",
            sample="AssertionError: model must base PipelineModule",
        ),
        Signature(
            words="invalid+grid",
            pattern=r"^AssertionError: Invalid Grid$",
            after=r"pipe[/\\]topology\.py",
            title="the sizes of the pipeline's topology do not multiply to the number of ranks",
            fix="choose pipeline, data and tensor-parallel sizes whose product is the number of ranks",
            sample='  File "/venv/deepspeed/runtime/pipe/topology.py", line 295, in __init__\n'
            "AssertionError: Invalid Grid",
        ),
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"assert self\.(?:dp_world_size == self\.grid\.data_parallel_size|train_batch_size\(\) == \\?)",
            title="the batch sizes, or the data-parallel size, do not fit the pipeline's grid",
            fix="let train_batch_size be micro batch x gradient_accumulation_steps x (ranks / stages), or give two "
            "of the three only",
            sample="    assert self.train_batch_size() == \\\nAssertionError",
        ),
        Signature(
            words="int+string+real typeerror+int",
            pattern=r"^TypeError: int\(\) argument must be a string.{0,80}not 'NoneType'",
            after=r'int\(os\.environ\.get\("LOCAL_RANK", None\)\)',
            title="the pipeline was started without a launcher: LOCAL_RANK is not set",
            fix="start the script with a launcher (deepspeed or torchrun)",
            sample='    self.local_rank = int(os.environ.get("LOCAL_RANK", None))\n'
            "TypeError: int() argument must be a string, a bytes-like object or a real number, not 'NoneType'",
        ),
    ),
)

PIPELINE_OWN_CHECKS = Rule(
    id="pipeline-own-checks",
    stage=Stage.RUN,
    title="the pipeline's grid of ranks or its layers are asked for something that they do not have: {what}",
    fix="give PipelineModule as many stages as divide the ranks (num_stages, or a topology whose sizes multiply to the "
    "world size), ask for "
    "layers between 0 and their number, and send only between neighbouring stages; reduce_output takes avg",
    manual="""PipelineModule lays a grid of pipeline, data and tensor parallel ranks over the world, and numbers its layers.

A rank, an axis, a layer or a reduction that is not in it is refused.

Why it matters: The engine, or its first batch, stops on the rank that asks.""",
    signatures=(
        Signature(
            words="layer+owned rank+topology reduction+type+supported adjacent+ranks pipeline+parallelism strictly+positive "
            "checkpointable_layers",
            pattern=r"(?:Runtime|Value|Assertion|NotImplemented)Error: (?P<what>Layer -?\d{1,6} not owned|rank \d{1,6}"
            r" not found in topology"
            r"|reduction type \S{1,30} not supported|Functionality currently limited to send and receive between adjacent ranks"
            r"|There is no pipeline parallelism|Values must be strictly positive|param `checkpointable_layers` must be"
            r" type of list)",
            sample="ValueError: rank 9 not found in topology.",
        ),
    ),
)

RULES = (
    PIPELINE_SHAPES,
    PIPELINE_BATCH,
    PIPELINE_TENSOR_WITHOUT_GRADIENT,
    PIPELINE_TENSORS,
    PIPELINE_MODULE,
    PIPELINE_OWN_CHECKS,
)
