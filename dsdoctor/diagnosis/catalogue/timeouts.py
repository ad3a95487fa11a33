"""The rule of ranks that wait for each other: watchdogs, barriers, stores, and what tells who is missing."""

from dsdoctor.core.fix import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

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
    fix="find the rank that died, hung or took another path: read the first error of every rank's log, then test "
    "the network",
    steps=(
        step("python -m dsdoctor diagnose rank*.log"),
        step("python -m dsdoctor comm"),
        step("export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1"),
    ),
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
            sample="model.class is <class 'transformers.models.mixtral.modeling_mixtral.MixtralForCausalLM'>\n"
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=211067, "
            "OpType=_ALLGATHER_BASE)",
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
            words="watchdog",
            pattern=r"Watchdog caught collective operation timeout(?:.{0,80}OpType=(?P<operation>\w+))?|watchdog "
            r"(?:hang|got stuck)"
            r"|watchdog thread terminated with exception",
            tier=Tier.GENERIC,
            sample="[E ProcessGroupNCCL.cpp:475] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800123 "
            "milliseconds before timing out.",
        ),
        Signature(
            words="operations+nccl",
            pattern=r"Some NCCL operations have failed or timed out",
            tier=Tier.GENERIC,
            sample="[E ProcessGroupNCCL.cpp:455] Some NCCL operations have failed or timed out. Due to the "
            "asynchronous nature of CUDA kernels,",
        ),
        Signature(
            words="gloo+closed gloo+reset",
            pattern=r"gloo/transport/.{0,120}Connection (?:closed by peer|reset by peer)",
            tier=Tier.GENERIC,
            title="another rank closed its connection: it died first, and its own log says why",
            sample="RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
            "[10.0.0.2]:58043",
        ),
        Signature(
            words="out+timed wait+timeout socket+timeout store+timeout monitoredbarrier timeout+keys "
            "collective+timeout rendezvoustimeouterror",
            pattern=r"Timed out waiting \d+ms for (?P<operation>recv|send) operation|wait timeout after \d+ms, "
            r"keys|Timed out after \d+ seconds waiting for clients"
            r"|(?:DistBackend|DistStore|Runtime)Error: Socket Timeout|store->get\(.{0,80}(?:[Tt]imeout|timed out)"
            r"|failed to pass monitoredBarrier|timed out in monitoredBarrier|reached monitoredBarrier, but "
            r"received errors"
            r"|dump signal due to a collective timeout|initializing process group in store based "
            r"barrier|RendezvousTimeoutError",
            tier=Tier.GENERIC,
            sample="torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 2/3 "
            "clients joined.",
        ),
    ),
)

RULES = (NCCL_COLLECTIVE_TIMEOUT,)
