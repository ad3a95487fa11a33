"""Rules of sequence parallelism (Ulysses, FPDT): heads, sequence lengths, position_ids, attention, groups."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

SEQUENCE_PARALLEL_SIZE = Rule(
    id="sequence-parallel-size",
    stage=Stage.RUN,
    title="{what|the attention heads} cannot be divided by the sequence-parallel size {size|that was asked for}",
    fix="choose a sequence_parallel_size that divides the number of attention heads (num_attention_heads), goes into "
    "num_key_value_heads or is a multiple of it, and divides the number of ranks",
    manual="""Ulysses gives each rank of a sequence-parallel group the whole sequence for a part of the heads.

So the group cannot have more ranks than the model has heads, and the heads must divide evenly. The ranks of the run
are then divided into such groups.

Why it matters: The model cannot be made, or its first forward stops.""",
    signatures=(
        Signature(
            words="heads+sequence+parallel head+sp heads+ulysses_sp_size num_attention_heads+ulysses "
            "num_attention_heads+ulysses_sp_size num_key_value_heads+ulysses_sp_size",
            pattern=r"Error: (?P<what>(?:Number of (?:key-value )?heads|(?:KV )?[Aa]ttention head "
            r"count|num_attention_heads|num_key_value_heads|num_heads|Num(?:ber)? of attention heads)[^:]{0,40}?) "
            r"(?:must be|should be|is not) (?:evenly )?(?:divisible by|at least) (?:the )?(?:SP size|sequence[ "
            r"_]parallel(?: world)?[ _]size|ulysses\w{0,40}(?: sequence parallel size)?|sp[_ ]size)[ "
            r"(]{0,2}(?P<size>\d{1,6})?",
            sample="AssertionError: Number of heads (30) must be divisible by the sequence parallel size (4)!",
        ),
        Signature(
            words="sequence_parallel_size+world_size sequence_parallel_size+greater sequence+parallel+world",
            pattern=r"Error: (?P<what>world[_ ]size (?:\(\d{1,6}\) )?)(?:is not divisible by|is less than|should be "
            r"divisible by|must be divisible by) (?:the )?sequence[_ ]parallel[_ ]size ?\(?(?P<size>\d{1,6})?",
            title="the world size cannot be divided into sequence-parallel groups of {size|this many} ranks",
            fix="choose a sequence_parallel_size that divides the number of ranks",
            sample="RuntimeError: world_size (6) is not divisible by sequence_parallel_size 4)",
        ),
        Signature(
            words="sequence_parallel_size+greater",
            pattern=r"ValueError: sequence_parallel_size must be greater than 1, got (?P<size>\S{1,12})",
            title="sequence parallelism was asked for with a sequence_parallel_size of {size}; it begins at 2",
            sample="ValueError: sequence_parallel_size must be greater than 1, got 1",
        ),
        Signature(
            words="tuple+range list+range",
            pattern=r"^IndexError: (?:tuple|list) index out of range",
            after=r"gx = torch\.empty_like\(grad_outputs\[rank\]\)",
            title="the backward of an all_gather within a sequence-parallel group takes the rank of the whole world: "
            "sequence_parallel_size is smaller than the world size",
            fix="take a newer torch and DeepSpeed, or a sequence_parallel_size that equals the number of ranks; in own "
            "code gather the losses with a function that knows the group's own rank",
            sample="    gx = torch.empty_like(grad_outputs[rank])\nIndexError: tuple index out of range",
        ),
    ),
)

SEQUENCE_PARALLEL_LENGTH = Rule(
    id="sequence-parallel-length",
    stage=Stage.RUN,
    title="the sequence length {length|of a batch} does not fit the sequence-parallel size {size|of this run}",
    fix="pad each batch so that its length is a multiple of the sequence-parallel size (pad_to_multiple_of in the "
    "collator); where lengths differ between batches, set seq_length_is_variable=True",
    manual="""Each rank of a sequence-parallel group gets an equal part of the sequence.

A length that does not divide is refused by newer releases; older ones lost the rest, or failed in the all-to-all. A
length that was fixed when Ulysses was registered must hold for every batch.

Why it matters: The step stops, and other ranks wait.""",
    signatures=(
        Signature(
            words="seqlen+divisible sequence+length+divisible seq_len+divisible seq_length+divisible",
            pattern=r"Error: (?:batch's )?(?:seqlen|seq_len(?:gth)?|[Ss]equence length)[ "
            r"=]{0,2}\(?(?P<length>\d{1,9})?\)?.{0,12}? (?:isn't|is not|must be|should be) (?:evenly )?divisible by "
            r"(?:the )?(?:sp|sequence|world|ulysses)[\w -]{0,40}[=( ]{0,2}(?P<size>\d{1,6})?",
            sample="ValueError: batch's seqlen=1001 isn't divisible by sp-size=4",
        ),
        Signature(
            words="seq_length_is_variable",
            pattern=r"ValueError: Either `seq_length_is_variable` needs to be `True` or `seq_length` needs to be set",
            title="Ulysses was registered without a length: neither seq_length nor seq_length_is_variable is set",
            sample="ValueError: Either `seq_length_is_variable` needs to be `True` or `seq_length` needs to be set "
            "to an integer value",
        ),
        Signature(
            words="query+tensor+required key+tensor+required context+shape",
            pattern=r"AssertionError: (?:\[\d{1,6}\]: (?:query|key or value) input tensor does not match the "
            r"required shape|The context shape .{1,80} is not of the expected shape)",
            title="a batch has another shape than the one that Ulysses was registered for (sequence length, micro "
            "batch or heads)",
            fix="give every batch the seq_length and micro_batch_size that "
            "UlyssesSPAttentionHF.register_with_transformers got, or set seq_length_is_variable=True",
            sample="AssertionError: [0]: query input tensor does not match the required shape",
        ),
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"assert (?:global_seq_len % (?:sp_size|args)|local_seq_len % num_chunk_per_gpu|chunk_size \* "
            r"num_chunks? ==)",
            title="the sequence length is not a multiple of the sequence-parallel size and of FPDT's chunk size",
            fix="choose a sequence length that the sequence-parallel size and ds_sequence_parallel_fpdt_chunk_size "
            "both divide",
            sample="    assert global_seq_len % sp_size == 0\nAssertionError",
        ),
    ),
)

SEQUENCE_PARALLEL_SETUP = Rule(
    id="sequence-parallel-setup",
    stage=Stage.RUN,
    title="sequence parallelism (Ulysses) is not set up completely: {what|see the message}",
    fix="make the groups first (register_with_transformers, or an mpu with a sequence-parallel group, or mesh_param), "
    "give every batch position_ids and labels, and use flash attention or sdpa",
    manual="""Ulysses replaces the attention of the model, divides each batch, and needs groups of ranks for both.

Each token keeps its place in the whole sequence only by position_ids. Attention that needs a full mask (eager) is not
taken. The data loader is wrapped by UlyssesSPDataLoaderAdapter.

Why it matters: The first batch fails, or would be computed wrongly.""",
    signatures=(
        Signature(
            words="ulysses+position_ids",
            pattern=r"Error: Ulysses SP requires `?position_ids`? in every (?P<what>forward|dataloader)",
            title="Ulysses needs position_ids in every batch ({what}), and got none",
            fix="let the collator add position_ids: torch.arange(length) for each sample, beginning again at 0 for "
            "each packed one",
            sample="ValueError: Ulysses SP requires `position_ids` in every dataloader batch so that each token "
            "retains its position",
        ),
        Signature(
            words="attn_implementation+ulysses attn_implementation+valid core_attn_implementation fpdt+flash",
            pattern=r"Error: (?P<what>\S{1,60} attn_implementation isn't currently supported by Ulysses|\S{1,60} is "
            r"not a valid attn_implementation|core_attn_implementation='\w{1,60}' does not match|DeepSpeed "
            r"FPDT requires flash-attn)",
            title="sequence parallelism does not go together with the attention that the model uses: {what}",
            fix="load the model with attn_implementation='flash_attention_2' (or 'sdpa'), and give Ulysses the same "
            "name; install flash-attn where the message names it",
            steps=(step("python -m pip install flash-attn --no-build-isolation"),),
            sample="ValueError: eager attn_implementation isn't currently supported by Ulysses sequence parallelism "
            "because it requires a 4D attention_mask",
        ),
        Signature(
            words="sequence+group+initialized sequence+parallel+group",
            pattern=r"(?:AssertionError: sequence (?:data )?parallel group is (?P<what>not|already) "
            r"initialized|KeyError: .No sequence parallel group found)",
            title="the sequence-parallel group was {what|not} initialized when it was used",
            fix="make the groups once, before deepspeed.initialize: "
            "UlyssesSPAttentionHF.register_with_transformers(...), and give the mpu that it returns to "
            "deepspeed.initialize (or mesh_param=(data, sequence))",
            sample="AssertionError: sequence parallel group is not initialized",
        ),
        Signature(
            words="auto_wrap_model_for_sp uneven+async",
            pattern=r"Error: (?P<what>auto_wrap_model_for_sp: no recognisable attention modules found|uneven head sp "
            r"does not support async op)",
            sample="ValueError: auto_wrap_model_for_sp: no recognisable attention modules found. Add the model's "
            "attention class name",
        ),
        Signature(
            words="shape+input_ids+match shift_labels+provided",
            pattern=r"ValueError: (?P<what>\w{1,40}'s shape .{1,60} must match input_ids's shape|labels or "
            r"shift_labels must be provided)",
            sample="ValueError: attention_mask's shape torch.Size([1, 9]) must match input_ids's shape "
            "torch.Size([1, 8])",
        ),
        Signature(
            words="get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_rank",
            pattern=r"AttributeError: module '(?P<what>[\w.]{0,80}parallel_state_sp)' has no attribute 'get_\w{1,40}'",
            title="the mpu of Ulysses ({what}) lacks a function of tensor parallelism that ZeRO stage 0 with bf16 "
            "asks for",
            fix="use ZeRO stage 1, 2 or 3 with sequence parallelism, or a newer DeepSpeed",
            sample="AttributeError: module 'deepspeed.runtime.sequence_parallel.parallel_state_sp' has no attribute "
            "'get_model_parallel_rank'",
        ),
    ),
)

RULES = (SEQUENCE_PARALLEL_SIZE, SEQUENCE_PARALLEL_LENGTH, SEQUENCE_PARALLEL_SETUP)
