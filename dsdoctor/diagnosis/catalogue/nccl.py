"""Rules of NCCL and of collectives: GPUs that are used twice or do not reach each other, InfiniBand, calls that do not fit."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

NCCL_DUPLICATE_GPU = Rule(
    id="nccl-duplicate-gpu",
    stage=Stage.RUN,
    title="two ranks use the same GPU{ranks_hint}",
    fix="let each rank choose its own: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything "
    "touches the GPU; start no more ranks than there are GPUs",
    steps=(step("nvidia-smi"), step("echo $CUDA_VISIBLE_DEVICES")),
    manual="""NCCL found the same GPU in two ranks of one group, and refuses.

The script never chose a device (all take GPU 0), chose by RANK instead of LOCAL_RANK, or more ranks were started than
GPUs are visible. A hostname that is the same on two machines looks the same to NCCL as well (NCCL_HOSTID).

Why it matters: The first collective fails on all ranks.""",
    signatures=(
        Signature(
            words="duplicate+gpu",
            pattern=r"Duplicate GPU detected ?:? (?P<ranks>rank \d{1,5} and rank \d{1,5}) both on CUDA device",
            sample="node1:97:97 [0] init.cc:872 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on "
            "CUDA device 1a000",
        ),
    ),
)

NCCL_PEER_ACCESS = Rule(
    id="nccl-peer-access",
    stage=Stage.RUN,
    title="two GPUs of this node cannot reach each other's memory",
    fix="try NCCL_P2P_DISABLE=1: if it works then, the node's IOMMU, ACS or virtualization stands between the "
    "GPUs (dsdoctor comm tells); NCCL_P2P_LEVEL limits it to NVLink",
    steps=(step("python -m dsdoctor comm"), step("nvidia-smi topo -m"), step("export NCCL_P2P_DISABLE=1")),
    manual="""NCCL or CUDA wanted direct access from one GPU to another, and the driver or the node refuses.

Some boards and virtual machines have none; IOMMU and ACS break it while the driver still offers it. Too many peers (more
than 8) give a message of their own.

Why it matters: The first collective fails, or hangs.""",
    signatures=(
        Signature(
            words="peer+access peer+mapping",
            pattern=r"(?:failure|error:?) '?(?:\d{1,4} )?'?(?:peer access is not supported between these two "
            r"devices|peer mapping resources "
            r"exhausted|peer access has not been enabled)",
            sample="node1:97:176 [0] transport/p2p.cc:431 NCCL WARN Cuda failure 'peer access is not supported "
            "between these two devices'",
        ),
    ),
)

MEMLOCK_LIMITED = Rule(
    id="memlock-limited",
    stage=Stage.RUN,
    title="InfiniBand cannot register memory: the locked memory of this process is limited",
    fix="allow locked memory without limit, where the ranks start: ulimit -l unlimited, in a container --ulimit "
    "memlock=-1, under Slurm LimitMEMLOCK=infinity of slurmd",
    steps=(step("ulimit -l"), step("docker run --ulimit memlock=-1 ...")),
    manual="""ibv_reg_mr or ibv_create_cq got no memory.

RDMA pins what it sends. The limit of locked memory (`ulimit -l`) holds where the ranks start, not in your shell: a
scheduler, ssh or a container may set another.

Why it matters: NCCL fails at its start on that node.""",
    signatures=(
        Signature(
            words="ibv_reg_mr+memory ibv_reg_mr_iova2+memory ibv_create_cq+memory ibv_create_qp+memory",
            pattern=r"Call to ibv_(?:reg_mr\w{0,12}|create_cq|create_qp) failed with error Cannot allocate memory",
            sample="node1:97:176 [0] misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr failed with error Cannot "
            "allocate memory",
        ),
    ),
)

NCCL_INVALID_USAGE = Rule(
    id="nccl-invalid-usage",
    stage=Stage.RUN,
    title="NCCL was called in a way that it refuses (ncclInvalidUsage): most often two ranks on one GPU, or two "
    "NCCLs in one process",
    fix="see the line of NCCL WARN above with NCCL_DEBUG=WARN: it names the reason; check that each rank has its "
    "own GPU",
    steps=(step("export NCCL_DEBUG=WARN"), step("nvidia-smi")),
    explained_by=("nccl-duplicate-gpu",),
    manual="""NCCL checks its arguments, and found something wrong.

Without NCCL_DEBUG its own message is not in the log.

Why it matters: The first collective fails on all ranks.""",
    signatures=(
        Signature(
            words="ncclinvalidusage",
            pattern=r"ncclInvalidUsage",
            tier=Tier.GENERIC,
            sample="ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        ),
    ),
)

NCCL_CALL_FAILED = Rule(
    id="nccl-call-failed",
    stage=Stage.RUN,
    title="a call inside of NCCL failed, and this line does not say why",
    fix="run again with NCCL_DEBUG=INFO: the line of NCCL WARN names the reason (a CUDA error, a full GPU, the "
    "network). Another NCCL than torch's own on LD_LIBRARY_PATH does this, too",
    steps=(step("export NCCL_DEBUG=INFO"), step("python -m dsdoctor comm")),
    explained_by=(
        "gpu-oom",
        "gpu-illegal-access",
        "gpu-hardware-error",
        "nccl-out-of-memory",
        "nccl-duplicate-gpu",
        "nccl-peer-access",
        "nccl-network-interface",
        "efa-send-failed",
        "nccl-collective-timeout",
        "nccl-cuda-failure",
        "no-kernel-image",
    ),
    manual="""NCCL returned an internal error, or an error of CUDA that it could not handle.

Its own warning with the reason is only in the log with NCCL_DEBUG=WARN or INFO.

Why it matters: The message alone does not decide between the GPU, the driver and the network.""",
    signatures=(
        Signature(
            words="ncclunhandledcudaerror ncclinternalerror",
            pattern=r"^(?:ncclUnhandledCudaError|ncclInternalError): ",
            tier=Tier.GENERIC,
            sample="ncclUnhandledCudaError: Call to CUDA function failed.",
        ),
    ),
)

NCCL_CUDA_FAILURE = Rule(
    id="nccl-cuda-failure",
    stage=Stage.RUN,
    title="CUDA refused a call of NCCL ({problem}, in {place})",
    fix="see nvidia-smi and dmesg for an error of the driver; then try the feature off that the file name tells, and "
    "a newer NCCL: NCCL_CUMEM_ENABLE=0, NCCL_P2P_DISABLE=1, NCCL_NVLS_ENABLE=0",
    steps=(
        step("export NCCL_DEBUG=INFO"),
        step("nvidia-smi"),
        step("sudo dmesg -T | grep -i xid"),
        step("python -m dsdoctor comm"),
    ),
    explained_by=(
        "gpu-oom",
        "gpu-illegal-access",
        "gpu-hardware-error",
        "nccl-out-of-memory",
        "nccl-peer-access",
        "nccl-shm-too-small",
        "no-kernel-image",
        "driver-too-old",
    ),
    manual="""NCCL's own warning names the file in which a call of CUDA failed, and CUDA's error.

nvls is the multicast of NVSwitch: it needs a fabric manager in the driver's version. p2p and cumem are memory shared
between processes: containers without --ipc=host, vGPUs and old drivers refuse it. An error of an earlier kernel shows
here, too.

Why it matters: All ranks of this node fail in their first collective.""",
    signatures=(
        Signature(
            words="cuda+failure",
            pattern=r"(?P<place>transport/nvls\.cc):\d{1,5} NCCL WARN Cuda failure (?:\d{1,4} "
            r")?'?(?P<problem>[^']{3,80})'?",
            title="NCCL could not set up the multicast of NVSwitch (NVLS): {problem}",
            fix="set NCCL_NVLS_ENABLE=0; for the cure let nvidia-fabricmanager run in exactly the driver's version "
            "and reset the GPUs; a container needs all GPUs of the node for NVLS, and newer NCCL falls back by "
            "itself",
            steps=(
                step("export NCCL_NVLS_ENABLE=0"),
                step("sudo systemctl status nvidia-fabricmanager"),
                step("nvidia-smi -q"),
            ),
            sample="node1:3569864:3571330 [0] transport/nvls.cc:598 NCCL WARN Cuda failure 1 'invalid argument'",
        ),
        Signature(
            words="cuda+failure",
            pattern=r"(?<![\w./])(?P<place>[\w./]{1,100}\.(?:cc|cu|h)):\d{1,5} NCCL WARN Cuda failure (?:\d{1,4} "
            r")?'?(?P<problem>(?!out of memory|peer access|peer mapping|an illegal|CUDA driver "
            r"version|uncorrectable)[\w ,()-]{3,80})'?",
            unless=r"nvls\.cc|no kernel image",
            tier=Tier.GENERIC,
            sample="node1:4167:5269 [0] transport/p2p.cc:275 NCCL WARN Cuda failure 'invalid argument'",
        ),
        Signature(
            words="mismatched+nccl+version",
            pattern=r"Mismatched NCCL version detected ?: local version (?P<problem>\d{3,6}) remote version "
            r"(?P<place>\d{3,6})",
            title="the ranks use different releases of NCCL ({problem} here, {place} there)",
            fix="install the same torch (and so the same NCCL) on all nodes, and see that LD_LIBRARY_PATH and "
            "LD_PRELOAD bring no other one",
            steps=(step("python -m pip list"), step("echo $LD_LIBRARY_PATH $LD_PRELOAD")),
            sample="node1:12:12 [0] NCCL WARN Mismatched NCCL version detected : local version 22707 remote version "
            "22604",
        ),
    ),
)

COLLECTIVES_DIFFER = Rule(
    id="collectives-differ",
    stage=Stage.RUN,
    title="the ranks call a different collective at the same time: {here|one} on rank {rank|one of them}",
    fix="find the branch that only some ranks take (if rank == 0, a condition on the data, an early end of the "
    "data) and give all ranks the same collectives in the same order and sizes",
    steps=(step("export TORCH_DISTRIBUTED_DEBUG=DETAIL"), step("export TORCH_FR_BUFFER_SIZE=2000")),
    manual="""TORCH_DISTRIBUTED_DEBUG=DETAIL compared what the ranks call, and they do not call the same.

All ranks must call the same collectives in the same order, with tensors of the same size and type.

Why it matters: Without the check the ranks hang, or exchange the wrong data.""",
    signatures=(
        Signature(
            words="mismatch+collectives",
            pattern=r"Detected mismatch between collectives on ranks\. Rank (?P<rank>\d{1,6}) is running "
            r"(?:collective|inconsistent "
            r"collective): CollectiveFingerPrint\((?:SequenceNumber=\d{1,12}, )?OpType=(?P<here>\w{1,40})",
            sample="RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
            "CollectiveFingerPrint(SequenceNumber=0, OpType=BROADCAST, TensorShape=[64])",
        ),
        Signature(
            words="preamble+nbytes",
            pattern=r"op\.preamble\.length <= op\.nbytes(?:\. (?P<here>\d{1,18}) vs (?P<there>\d{1,18}))?",
            title="the ranks call a collective with tensors of different size ({here|one} and {there|another} "
            "bytes), or different collectives",
            sample="terminate called: [enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= "
            "op.nbytes. 512 vs 256",
        ),
    ),
)

EFA_SEND_FAILED = Rule(
    id="efa-send-failed",
    stage=Stage.RUN,
    title="EFA (libfabric) could not deliver to the other node: most often the security group does not let EFA through",
    fix="let the security group allow all traffic to and from itself, in both directions (EFA is no TCP: rules for ports do not "
    "do it), and put the nodes into one subnet. Then see that the EFA installer, libfabric and aws-ofi-nccl are of the same, new "
    "releases on all nodes and in the image. If a rank on the other node ended before, that comes first",
    steps=(
        step("fi_info -p efa -t FI_EP_RDM"),
        step("cat /opt/amazon/efa_installed_packages"),
        step("fi_pingpong -p efa OTHER_NODE", note="start it without a name on the other node first"),
        step("python -m dsdoctor comm"),
    ),
    manual="""NCCL sends through libfabric to AWS' Elastic Fabric Adapter, and a send was completed with an error.

EFA's packets pass only where the security group allows all traffic to itself, inbound and outbound, and within one subnet.
Versions of the installer, the driver and aws-ofi-nccl that do not fit end alike. The words of the error ("Not a directory")
are only its number read as one of the system's.

Why it matters: The first collective between nodes fails; within one node all is well.""",
    signatures=(
        Signature(
            words="ofi+completed",
            pattern=r"NCCL WARN NET/OFI .{0,120}completed with error",
            tier=Tier.GENERIC,
            sample="algo-2:78:278 [0] ofi_process_cq:1039 NCCL WARN NET/OFI Request 0x7fbb944a6bb8 completed with error. "
            "RC: 20. Error: unknown error.",
        ),
        Signature(
            words="libfabric+efa+cq",
            pattern=r"libfabric:\d{1,12}:\d{1,12}:[\w-]{0,40}:efa:cq:\w{1,60}\(\)(?::\d{1,6})?<warn> .{0,60}\berr(?:or)?\b",
            tier=Tier.GENERIC,
            sample="libfabric:78:1673041632::efa:cq:rxr_cq_write_tx_error():243<warn> rxr_cq_write_tx_error: err: 20, "
            "prov_err: Not a directory (20)",
        ),
    ),
)

RULES = (
    NCCL_DUPLICATE_GPU,
    NCCL_PEER_ACCESS,
    MEMLOCK_LIMITED,
    NCCL_INVALID_USAGE,
    NCCL_CALL_FAILED,
    NCCL_CUDA_FAILURE,
    COLLECTIVES_DIFFER,
    EFA_SEND_FAILED,
)
