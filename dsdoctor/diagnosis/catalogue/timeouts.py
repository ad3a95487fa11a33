"""The rule of ranks that wait for each other: watchdogs, barriers, stores, and what tells who is missing."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

WAITED = (
    r"Watchdog caught collective operation timeout|wait timeout after \d{1,12}ms, keys|Timed out initializing "
    r"process group in store"
    r"|Timed out waiting \d{1,12}ms for (?:recv|send) operation"
)
"""What a rank prints that waited in vain."""

PREPARING = (
    r"(?:Map|Filter|Flatten\w{0,10}|Grouping texts|Group texts|Running tokenizer|Tokeniz\w{1,12}|Converting format"
    r"|Packing|Preprocess\w{0,8}|"
    r"Generating \w{1,12} split|Saving the dataset|Adding EOS|Truncating)[^|]{0,60}?: {1,4}\d{1,2}%\|"
)
EVALUATING = (
    r"\bin (?:evaluate|evaluation_loop|prediction_loop|prediction_step|compute_metrics|generate)\b|Running "
    r"(?:Evaluation|Prediction)"
)
LOADING = r"Loading (?:checkpoint shards|safetensors|pipeline components)[^|]{0,40}: {1,4}\d{1,2}%\|"
TRAINING = r"'loss'|\bloss[=:]|Running training|\biteration \d|\bglobal_step"

FIND_THE_RANK = (
    step("python -m dsdoctor diagnose rank*.log"),
    step("python -m dsdoctor comm"),
    step("py-spy dump --pid PID", note="of the rank that does not come, while the others wait"),
)
OF_NCCL = (*FIND_THE_RANK, step("export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1"))
"""The recorder of flights is NCCL's: gloo and the store have none."""

NCCL_COLLECTIVE_TIMEOUT = Rule(
    id="nccl-collective-timeout",
    explained_by=(
        "host-ram-oom",
        "compiler-oom-killed",
        "cpu-isa-illegal-instruction",
        "nccl-shm-too-small",
        "nccl-network-interface",
        "master-port-in-use",
        "no-kernel-image",
        "gpu-oom",
        "gpu-illegal-access",
        "gpu-hardware-error",
        "gpu-assert",
        "nccl-out-of-memory",
        "disk-full",
        "job-time-limit",
        "job-preempted",
    ),
    stage=Stage.RUN,
    title="ranks waited for each other in {operation|a collective} until the watchdog fired",
    fix="find the rank that died, hung or took another path: read the first error of every rank's log, then test the "
    "network. If one rank is only slow (it saves, evaluates or prepares data alone), raise the timeout: "
    "ddp_timeout, deepspeed.init_distributed(timeout=...). If it hangs at the first collective of one node, "
    "NCCL_P2P_DISABLE=1 tells whether the GPUs reach each other, NCCL_IB_DISABLE=1 the same of InfiniBand",
    steps=FIND_THE_RANK,
    manual="""Ranks waited in a collective for another rank until the watchdog ended them.

All ranks must call the same collectives in the same order. When one dies, hangs, or takes another path (a branch
on the rank, a longer evaluation, an uneven data set), the others wait.

Why it matters: This log is of a rank that waited. The cause is in the log of the rank that did not come.""",
    signatures=(
        Signature(
            words="watchdog+_allgather_base watchdog+allgather_base",
            pattern=r"Watchdog caught collective operation timeout: WorkNCCL\(.{0,60}OpType=_?ALLGATHER_BASE",
            after=r"[Mm]ixtral|MoE\b|[Dd]eepseekV[23]|Qwen\w{0,10}Moe",
            tier=Tier.GENERIC,
            title="ranks waited for each other in a gather, with a mixture of experts: under ZeRO-3 they fetch "
            "different experts",
            fix="under ZeRO-3 mark the block of experts as a leaf module: "
            "deepspeed.utils.set_z3_leaf_modules(model, [MixtralSparseMoeBlock]) before deepspeed.initialize; "
            "else find the rank that died or hung, as for every timeout",
            steps=OF_NCCL,
            sample="model.class is <class 'transformers.models.mixtral.modeling_mixtral.MixtralForCausalLM'>\n"
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=211067, "
            "OpType=_ALLGATHER_BASE)",
        ),
        Signature(
            words="watchdog wait+timeout timed+store barrier+timed",
            pattern=WAITED,
            after=PREPARING,
            not_after=TRAINING,
            tier=Tier.GENERIC,
            title="ranks waited for each other until the timeout while the data was prepared: rank 0 maps or "
            "tokenizes it alone and takes longer",
            fix="prepare the data once before the training (preprocess it, save_to_disk, or start on one process and "
            "let the cache be found), use more num_proc, or raise the timeout: ddp_timeout in the "
            "TrainingArguments, deepspeed.init_distributed(timeout=datetime.timedelta(hours=5))",
            steps=(step("py-spy dump --pid PID"),),
            sample="Running tokenizer on dataset:  43%|####      | 860000/2000000 [29:58<39:44, 478.11 examples/s]\n"
            "[rank1]:[E ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000)",
        ),
        Signature(
            words="watchdog wait+timeout out+timed",
            pattern=WAITED,
            after=EVALUATING,
            tier=Tier.GENERIC,
            title="ranks waited for each other until the timeout in evaluation or generation: they do not all run "
            "the same number of forwards",
            fix="under ZeRO-3 every forward is a collective: generate(..., synced_gpus=True), the same number of "
            "batches on each rank (drop_last, an evaluation set that divides), no metric or sample on rank 0 "
            "alone; where it is only slow, raise ddp_timeout",
            steps=(step("py-spy dump --pid PID"),),
            sample="***** Running Evaluation *****\n[rank1]:[E ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=98947, OpType=_ALLGATHER_BASE, NumelIn=16384000)",
        ),
        Signature(
            words="watchdog wait+timeout timed+store barrier+timed",
            pattern=WAITED,
            after=LOADING,
            not_after=TRAINING,
            tier=Tier.GENERIC,
            title="ranks waited for each other until the timeout while the model was loaded: one rank loads longer "
            "than the others wait",
            fix="put the model on a local disk, load it on all ranks alike, and raise the timeout: ddp_timeout in "
            "the TrainingArguments, deepspeed.init_distributed(timeout=datetime.timedelta(hours=2)); see that "
            "the host's memory holds a copy for each rank",
            steps=(step("free -g"), step("py-spy dump --pid PID")),
            sample="Loading checkpoint shards:  40%|####      | 12/30 [29:10<43:45, 145.8s/it]\n[rank1]:[E "
            "ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=2, OpType=BROADCAST, NumelIn=1)",
        ),
        Signature(
            words="watchdog out+timed wait+timeout monitoredbarrier",
            pattern=r"Watchdog caught collective operation timeout|Timed out waiting \d{1,12}ms for "
            r"(?:recv|send) operation"
            r"|wait timeout after \d{1,12}ms, keys",
            after=r"in save_checkpoint\b|\.save_checkpoint\(|accelerator\.save_state\(|save_16bit_model",
            tier=Tier.GENERIC,
            title="ranks waited for each other in save_checkpoint until the timeout: not all ranks call it, or "
            "saving takes longer",
            fix="call save_checkpoint (save_state) on every rank, not on rank 0 only. If all ranks do and saving "
            "is slow, raise the timeout: deepspeed.init_distributed(timeout=datetime.timedelta(hours=2)), "
            "ddp_timeout in the TrainingArguments",
            sample='  File "/venv/deepspeed/runtime/engine.py", line 4900, in save_checkpoint\n'
            "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv "
            "operation to complete",
        ),
        Signature(
            words="monitoredbarrier+failed",
            pattern=r"\bRanks? (?P<missing>\d[\d, ]{0,60}?) failed to pass monitoredBarrier in "
            r"(?P<milliseconds>\d{1,12}) ms",
            tier=Tier.GENERIC,
            fix="look at the log of rank {missing}: it died, hung, or works longer than the timeout. If it only "
            "needs longer (preparing data, saving), raise the timeout: "
            "deepspeed.init_distributed(timeout=datetime.timedelta(hours=2))",
            sample="RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 6000 ms",
        ),
        Signature(
            words="monitoredbarrier+waiting",
            pattern=r"Rank \d{1,6} (?:successfully reached monitoredBarrier, but received errors while waiting "
            r"for send/recv from rank "
            r"|timed out in monitoredBarrier after \d{1,12} ms waiting for rank )(?P<missing>\d{1,6})",
            tier=Tier.GENERIC,
            fix="look at the log of rank {missing} first. Where it alone does long work (preparing data), raise "
            "the timeout: deepspeed.init_distributed(timeout=datetime.timedelta(hours=2)), ddp_timeout in the "
            "TrainingArguments",
            sample="RuntimeError: Rank 3 successfully reached monitoredBarrier, but received errors while "
            "waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.",
        ),
        Signature(
            words="joined+clients",
            pattern=r"Timed out after \d{1,9} seconds waiting for clients\. (?P<joined>\d{1,6}/\d{1,6}) clients joined",
            tier=Tier.GENERIC,
            fix="see that every node was started, with the same MASTER_ADDR, MASTER_PORT and world size, and "
            "what the missing ranks' logs say; dsdoctor comm says who reaches whom",
            steps=(step("python -m dsdoctor comm"),),
            sample="torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 2/3 "
            "clients joined.",
        ),
        Signature(
            words="wait+timeout+keys",
            pattern=r"wait timeout after (?P<milliseconds>\d{1,12}) ?ms, keys: (?P<key>\S{1,120})",
            tier=Tier.GENERIC,
            fix="find the rank that sets the key (its name often says which) and read its log: it died, hung, "
            "took another path, or needs longer than the timeout",
            sample="torch.distributed.DistStoreError: wait timeout after 6000ms, keys: "
            "/default_pg/0//data-prepared-by-rank-1",
        ),
        Signature(
            words="timeout+waiting+key",
            pattern=r"(?:DistStore|DistBackend|Runtime)Error: Timeout waiting for key: (?P<key>\S{1,160}) after "
            r"(?P<milliseconds>\d{1,12}) ?ms",
            tier=Tier.GENERIC,
            title="a rank waited for the key {key} of the store until its timeout: the rank that sets it did not come",
            fix="find the rank that does not come: read the last lines of every rank's log, and ask each process where "
            "it stands",
            steps=(
                step("py-spy dump --pid PID"),
                step("python -m dsdoctor comm"),
            ),
            sample="torch.distributed.DistStoreError: Timeout waiting for key: default_pg/0//cuda//0 after 600000 ms",
        ),
        Signature(
            words="setting+communicator",
            pattern=r"\[(?P<rank>\d{1,6})\] is setting up NCCL communicator and retr(?:ei|ie)ving ncclUniqueId from "
            r"\[(?P<first>\d{1,6})\] via c10d key-value store",
            title="rank {rank} waited for rank {first} to begin the NCCL communicator (ncclUniqueId in the store): rank "
            "{first} had died, or never came to this collective",
            fix="read the log of rank {first}: its own error comes first, or it was still busy (tokenizing, loading, "
            "compiling); check that all ranks use the same MASTER_ADDR and reach it, and see where rank {first} stands",
            steps=(
                step("py-spy dump --pid PID"),
                step("python -m dsdoctor comm"),
            ),
            sample="RuntimeError: [1] is setting up NCCL communicator and retreiving ncclUniqueId from [0] via c10d "
            "key-value store by key '0', but store->get('0') got error: Timeout waiting for key: default_pg/0/0 after "
            "1800000 ms",
        ),
        Signature(
            words="store+barrier+timed",
            pattern=r"Timed out initializing process group in store based barrier on rank:? (?P<rank>\d{1,6}),? for "
            r"key: \S{1,80} \(world_size=(?P<world>\d{1,6}), "
            r"(?:worker_count|num_workers_joined)=(?P<joined>\d{1,6})",
            tier=Tier.GENERIC,
            fix="only {joined} of {world} ranks made this process group: every rank must call init_process_group and "
            "new_group, in the same order. See in every rank's log which of them did not come that far",
            sample="RuntimeError: Timed out initializing process group in store based barrier on rank: 3, for key: "
            "store_based_barrier_key:2 (world_size=8, worker_count=7, timeout=0:30:00)",
        ),
        Signature(
            words="dump+signal+timeout",
            pattern=r"Received a dump signal due to a collective timeout from {1,3}(?:this local rank|rank "
            r"(?P<first>\d{1,6}))(?:.{0,200}?Last enqueued NCCL work: (?P<enqueued>-?\d{1,12}), last completed NCCL "
            r"work: (?P<completed>-?\d{1,12}))?",
            tier=Tier.GENERIC,
            title="rank {first|this one} was the first to wait in a collective until the timeout (here work "
            "{enqueued|?} was the last one begun, {completed|?} the last one done)",
            fix='compare "last enqueued NCCL work" in every rank\'s log: the rank with the smallest number did not come '
            "to the collective; its log and py-spy say where it stood",
            steps=(
                step("grep -h -o -E 'Rank [0-9]+\\].*[Ll]ast enqueued NCCL work: [0-9]+' rank*.log"),
                step("py-spy dump --pid PID"),
                step("export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1"),
            ),
            sample="[rank4]:[E205 18:11:06.3 ProcessGroupNCCL.cpp:1682] [PG ID 0 PG GUID 0(default_pg) Rank 4] "
            "Received a dump signal due to a collective timeout from  rank 2 and we will try our best to dump "
            "the debug info. Last enqueued NCCL work: 17, last completed NCCL work: 16.",
        ),
        Signature(
            words="watchdog+stuck heartbeat+monitor+timed",
            pattern=r"ProcessGroupNCCL's watchdog got stuck for (?P<seconds>\d{1,6}) ?seconds|Heartbeat monitor "
            r"timed out!",
            tier=Tier.GENERIC,
            title="NCCL's own watchdog stood still for {seconds|many} seconds: a call of CUDA or NCCL "
            "did not return in this process",
            fix="ask the processes where they stand while they hang; a GPU error before it (Xid in dmesg), or another "
            "thread that holds Python's lock inside of a CUDA call, does it. Only where the work is merely slow, raise "
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
            steps=(
                step("py-spy dump --native --pid PID"),
                step("dmesg -T | grep -i xid"),
                step("python -m dsdoctor diagnose rank*.log"),
            ),
            sample="[rank0]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 0] [PG 0 Rank 0] ProcessGroupNCCL's watchdog got "
            "stuck for 600 seconds without making progress in monitoring enqueued collectives.",
        ),
        Signature(
            words="watchdog",
            pattern=r"Watchdog caught collective operation timeout(?:.{0,80}OpType=(?P<operation>\w+))?|watchdog "
            r"(?:hang|got stuck)"
            r"|watchdog thread terminated with exception",
            tier=Tier.GENERIC,
            steps=OF_NCCL,
            sample="[E ProcessGroupNCCL.cpp:475] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800123 "
            "milliseconds before timing out.",
        ),
        Signature(
            words="operations+nccl",
            pattern=r"Some NCCL operations have failed or timed out",
            tier=Tier.GENERIC,
            steps=OF_NCCL,
            sample="[E ProcessGroupNCCL.cpp:455] Some NCCL operations have failed or timed out. Due to the "
            "asynchronous nature of CUDA kernels,",
        ),
        Signature(
            words="gloo+closed gloo+reset",
            pattern=r"gloo/transport/.{0,120}Connection (?:closed by peer|reset by peer)",
            tier=Tier.GENERIC,
            title="another rank closed its connection: it ended first, and its own log says how",
            fix="read that rank's own log: its error, the signal that ended it, or the end of its script. Gloo closes the "
            "connection within a second, so the time of this line is that of its end",
            steps=(step("python -m dsdoctor diagnose rank*.log"), step("torchrun --tee 3 --log-dir logs ...")),
            sample="RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
            "[10.0.0.2]:58043",
        ),
        Signature(
            words="out+timed wait+timeout socket+timeout store+timeout monitoredbarrier timeout+keys "
            "collective+timeout",
            pattern=r"Timed out waiting \d+ms for (?P<operation>recv|send) operation|wait timeout after \d+ms, "
            r"keys|Timed out after \d+ seconds waiting for clients"
            r"|(?:DistBackend|DistStore|Runtime)Error: Socket Timeout|store->get\(.{0,80}(?:[Tt]imeout|timed out)"
            r"|failed to pass monitoredBarrier|timed out in monitoredBarrier|reached monitoredBarrier, but "
            r"received errors"
            r"|dump signal due to a collective timeout|initializing process group in store based "
            r"barrier",
            tier=Tier.GENERIC,
            sample="torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 2/3 "
            "clients joined.",
        ),
    ),
)

RULES = (NCCL_COLLECTIVE_TIMEOUT,)
