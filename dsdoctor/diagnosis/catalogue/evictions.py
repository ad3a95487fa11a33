"""Rules of pods that Kubernetes evicts: of what the node, or the pod by its own limits, had too little."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

POD_EVICTED = Rule(
    id="pod-evicted",
    stage=Stage.RUN,
    title="Kubernetes evicted the pod: {why}",
    fix="ask for more of it (resources.requests and limits, ephemeral-storage), and write checkpoints, caches and logs to a "
    "volume instead of the container's own disk (HF_HOME, TRITON_CACHE_DIR, TMPDIR)",
    steps=(step("kubectl describe pod POD"), step("df -h /tmp /dev/shm")),
    manual="""The node ran out of something, or the pod wrote more than its limit, and the kubelet ended the pod.

The message of the pod says of what: ephemeral-storage is the disk below the container's own files and its emptyDir
volumes, where checkpoints and caches land unless a volume is mounted. An emptyDir of medium Memory is often
/dev/shm. The signal that the ranks got only follows. Eviction for memory is host-ram-oom.

Why it matters: The pod starts anew elsewhere without its files, and fills the next node's disk as well.""",
    signatures=(
        Signature(
            words="node+resource+low",
            pattern=r"The node was low on resource: (?P<what>(?!memory)[\w-]{2,40})",
            title="Kubernetes evicted the pod: the node was low on {what}",
            sample="  Warning  Evicted  kubelet  The node was low on resource: ephemeral-storage. Container trainer was "
            "using 200Gi",
        ),
        Signature(
            words="ephemeral+exceeds ephemeral+exceeded",
            pattern=r"(?P<why>Pod ephemeral local storage usage exceeds the total limit of containers \S{1,20}"
            r"|Container \S{1,60} exceeded its local ephemeral storage limit \S{1,20})",
            title="the pod wrote more to the container's own disk than its limit: {why}",
            sample="Message: Pod ephemeral local storage usage exceeds the total limit of containers 50Gi.",
        ),
        Signature(
            words="emptydir+exceeds",
            pattern=r"(?P<why>Usage of EmptyDir volume \S{1,60} exceeds the limit \S{1,20})",
            title="the pod was evicted: {why}",
            fix="raise the sizeLimit of that emptyDir; where it is /dev/shm (medium Memory), NCCL and the DataLoader's workers "
            "fill it: fewer workers, or a larger limit, which counts as memory of the pod",
            sample='Usage of EmptyDir volume "dshm" exceeds the limit "8Gi".',
        ),
        Signature(
            words="node+condition+diskpressure node+condition+pidpressure",
            pattern=r"The node had condition: \[(?P<what>DiskPressure|PIDPressure)\]",
            title="the node takes no pods, or evicted this one: {what}",
            sample="Message: Pod was rejected: The node had condition: [DiskPressure].",
        ),
        Signature(
            words="evicted",
            pattern=r"\b[Rr]eason: {1,20}Evicted\b|Pod was evicted",
            tier=Tier.GENERIC,
            title="Kubernetes evicted the pod, and this log does not say for lack of what (disk and memory are usual)",
            fix="the pod's own message names what the node had too little of: look there before it is deleted",
            steps=(
                step("kubectl describe pod POD"),
                step("kubectl get events --field-selector reason=Evicted --sort-by=.lastTimestamp"),
            ),
            sample="Reason:       Evicted",
        ),
    ),
)

RULES = (POD_EVICTED,)
