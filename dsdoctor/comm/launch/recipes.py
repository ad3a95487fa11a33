"""The Job by which Kubernetes starts the ranks: nodes and ranks in, YAML out. Starts nothing."""

from dataclasses import dataclass

from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import Host
from dsdoctor.hosts.hostfile import HOST, parse_hostfile


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a recipe is filled with."""

    per_node: int
    gpus: bool
    nodes: int = 2


def look_site(host: Host, *, nproc: int | None = None, hostfile: str | None = None) -> Site:
    """Look at what a recipe needs, without torch. Where no node is known it is two: the smallest number that tests a network."""
    gpus = len(host.glob("/dev/nvidia[0-9]*"))
    text = host.read(hostfile) if hostfile else None
    hosts = [entry for entry in parse_hostfile(text or "").hosts if HOST.fullmatch(entry.name)]
    slots = max((entry.slots for entry in hosts), default=0)
    return Site(per_node=nproc or slots or gpus or 2, gpus=gpus > 0, nodes=len(hosts) or 2)


def recipe(kind: str, site: Site) -> str:
    """The recipe of a kind, of which there is one, "k8s". Raises UsageError for another."""
    if kind != "k8s":
        raise UsageError(f"there is no recipe {kind!r}", hint="take k8s; srun and mpirun start ranks by one line")
    kind = "nvidia.com/gpu" if site.gpus else "cpu"
    return K8S.format(nodes=site.nodes, per_node=site.per_node, limit=f"{kind}: {site.per_node}")


K8S = """\
# kubectl apply -f THIS_FILE, and when the job is over:
# kubectl logs -l job-name=dsdoctor-comm,batch.kubernetes.io/job-completion-index=0 --tail=-1 | dsdoctor comm --read -
# the nodes find each other by the headless service
apiVersion: v1
kind: Service
metadata:
  name: dsdoctor-comm
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: dsdoctor-comm
---
apiVersion: batch/v1
kind: Job
metadata:
  name: dsdoctor-comm
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: 0
  template:
    spec:
      subdomain: dsdoctor-comm
      restartPolicy: Never
      containers:
        - name: ranks
          image: dsdoctor # yours, with torch and dsdoctor in it
          command: ["/bin/sh", "-c"]
          args:
            - >-
              exec python -m torch.distributed.run --nnodes {nodes} --nproc_per_node {per_node}
              --node_rank "$JOB_COMPLETION_INDEX" --master_addr dsdoctor-comm-0.dsdoctor-comm --master_port 29500
              -m dsdoctor.comm --json
          resources:
            limits:
              {limit}
          securityContext: {{capabilities: {{add: ["IPC_LOCK"]}}}} # InfiniBand pins memory
          volumeMounts:
            - name: shm
              mountPath: /dev/shm
      affinity: # one of these pods on a node
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            - topologyKey: kubernetes.io/hostname
              labelSelector:
                matchLabels:
                  job-name: dsdoctor-comm
      volumes:
        - name: shm # NCCL between the GPUs of a node needs more than the usual 64 MiB
          emptyDir:
            medium: Memory
"""
