"""The script by which a scheduler, Slurm or Kubernetes, starts the ranks: nodes and ranks in, text out. Starts nothing."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import Host
from dsdoctor.hosts.hostfile import HOST, parse_hostfile
from dsdoctor.hosts.nodelist import expand


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a recipe is filled with: ``nodes`` of a Slurm allocation or a hostfile, and the ranks of each."""

    python: str
    per_node: int
    gpus: bool
    nodes: int = 2


def look_site(host: Host, *, python: str, nproc: int | None = None, hostfile: str | None = None) -> Site:
    """Look at what a recipe needs, without torch. Where no node is known it is two: the smallest number that tests a network."""
    gpus = len(host.glob("/dev/nvidia[0-9]*"))
    text, allocated = host.read(hostfile) if hostfile else None, host.variable("SLURM_JOB_NODELIST")
    nodes, slots = len(expand(allocated)) if allocated else 0, 0
    if text is not None:
        hosts = [entry for entry in parse_hostfile(text).hosts if HOST.fullmatch(entry.name)]
        nodes, slots = len(hosts), max((entry.slots for entry in hosts), default=0)
    return Site(python=python, per_node=nproc or slots or gpus or 2, gpus=gpus > 0, nodes=nodes or 2)


def recipe(kind: str, site: Site) -> str:
    """The script of a kind: "slurm" or "k8s". Raises UsageError for another."""
    for name, write in RECIPES:
        if name == kind:
            return write(site)
    raise UsageError(f"there is no recipe {kind!r}", hint=f"take one of: {', '.join(name for name, _ in RECIPES)}")


def _slurm(site: Site) -> str:
    gpus = f"\n#SBATCH --gpus-per-node={site.per_node}" if site.gpus else ""
    return SLURM.format(
        nodes=site.nodes, per_node=site.per_node, gpus=gpus, python=shlex.quote(site.python), job="${SLURM_JOB_ID}"
    )


def _k8s(site: Site) -> str:
    kind = "nvidia.com/gpu" if site.gpus else "cpu"
    return K8S.format(nodes=site.nodes, per_node=site.per_node, limit=f"{kind}: {site.per_node}")


SLURM = """\
#!/bin/bash
# sbatch THIS_FILE [--quick | --full]: do the ranks of these nodes reach each other?
#SBATCH --job-name=dsdoctor-comm
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}{gpus}
#SBATCH --time=00:15:00
#SBATCH --output=dsdoctor-comm-%j.txt

# the ranks that are left report when one has failed
srun --kill-on-bad-exit=0 {python} -m dsdoctor.comm --json "$@" > "dsdoctor-comm-{job}.json"
{python} -m dsdoctor comm --read "dsdoctor-comm-{job}.json"
"""
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
RECIPES: tuple[tuple[str, Callable[[Site], str]], ...] = (("slurm", _slurm), ("k8s", _k8s))
