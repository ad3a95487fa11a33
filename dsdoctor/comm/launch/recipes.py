"""Facts of this machine -> a script that runs the communication test on a cluster. Writes nothing, starts nothing."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from dsdoctor.comm.local.interfaces import read_interfaces
from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import Host
from dsdoctor.hosts.hostfile import HOST, parse_hostfile
from dsdoctor.hosts.nodelist import expand

ROUTES = "/proc/net/route"


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a recipe is filled with. ``hosts`` are those of a Slurm allocation or a hostfile with their slots, () where neither
    is known; ``interface`` is the one of the default route where there are several to choose from; ``fabric`` are the InfiniBand
    or RoCE devices."""

    python: str
    per_node: int
    gpus: bool
    hosts: tuple[tuple[str, int], ...] = ()
    interface: str | None = None
    fabric: tuple[str, ...] = ()
    partition: str | None = None

    @property
    def nodes(self) -> int:
        """The hosts that are known, else two: the smallest number that tests a network."""
        return len(self.hosts) or 2


def look_site(host: Host, *, python: str, nproc: int | None = None, hostfile: str | None = None) -> Site:
    """Look at what a recipe needs: a second at the most, without torch."""
    gpus = len(host.glob("/dev/nvidia[0-9]*"))
    per_node = nproc or gpus or 2
    text = host.read(hostfile) if hostfile else None
    nodelist = host.variable("SLURM_JOB_NODELIST")
    hosts = tuple((name, per_node) for name in expand(nodelist)) if nodelist else ()
    if text is not None:
        hosts = tuple((entry.name, entry.slots) for entry in parse_hostfile(text).hosts if HOST.fullmatch(entry.name))
    sinfo = host.which("sinfo")
    names = {interface.name for interface in read_interfaces(host) if interface.up and interface.kind != "loopback"}
    return Site(
        python=python,
        per_node=per_node,
        gpus=gpus > 0,
        hosts=hosts,
        interface=parse_default_route(host.read(ROUTES) or "") if len(names) > 1 else None,
        fabric=tuple(path.rsplit("/", 1)[1] for path in host.glob("/sys/class/infiniband/*")),
        partition=parse_partition(host.run([sinfo, "-h", "-o", "%P"], timeout=5).stdout) if sinfo else None,
    )


def parse_default_route(text: str) -> str | None:
    """The interface of the default route in /proc/net/route, the one with the least metric.

    >>> parse_default_route("Iface Destination Gateway Flags RefCnt Use Metric Mask\\neth1 00000000 010011AC 0003 0 0 0 00000000")
    'eth1'
    """
    rows = [line.split() for line in text.splitlines()[1:]]
    ways = [
        (int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000" and row[6].isdecimal()
    ]
    return min(ways)[1] if ways else None


def parse_partition(text: str) -> str | None:
    """Slurm's default partition as ``sinfo -h -o %P`` marks it, else the first.

    >>> parse_partition("debug\\nall*\\n")
    'all'
    """
    names = text.split()
    return next((name for name in names if name.endswith("*")), names[0] if names else "").rstrip("*") or None


def recipe(kind: str, site: Site) -> str:
    """The script of a kind: "slurm", "hostfile", "torchrun" or "k8s". Raises UsageError for another."""
    for name, write in RECIPES:
        if name == kind:
            return write(site)
    raise UsageError(f"there is no recipe {kind!r}", hint=f"take one of: {', '.join(name for name, _ in RECIPES)}")


def _slurm(site: Site) -> str:
    head = [
        "#!/bin/bash",
        "#SBATCH --job-name=dsdoctor-comm",
        f"#SBATCH --nodes={site.nodes}",
        f"#SBATCH --ntasks-per-node={site.per_node}",
        *([f"#SBATCH --gpus-per-node={site.per_node}"] if site.gpus else []),
        *([f"#SBATCH --partition={site.partition}"] if site.partition else []),
        "#SBATCH --time=00:15:00",
        "#SBATCH --output=dsdoctor-comm-%j.txt",
    ]
    body = [
        "# sbatch THIS_FILE [--quick | --full]: do the ranks of these nodes reach each other?",
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 9000))",
        *_network(site),
        "",
        "# the ranks that are left report when one has failed",
        f'srun --kill-on-bad-exit=0 {shlex.quote(site.python)} -m dsdoctor.comm "$@"',
    ]
    return _text(head, [""], body)


def _hostfile(site: Site) -> str:
    known = bool(site.hosts)
    lines = [f"{name} slots={slots}" for name, slots in site.hosts] or [f"localhost slots={site.per_node}"]
    alone = [] if known else ["--no_ssh_check", "--master_addr", "127.0.0.1"]
    command = shlex.join([site.python, "-m", "deepspeed.launcher.runner", "--hostfile", "dsdoctor.hosts", *alone])
    body = [
        "#!/bin/bash",
        "# bash THIS_FILE [--quick | --full], on the first host, in a folder that all hosts have",
        *([] if known else ["# no other host is known here: name yours below, and remove the options before --module"]),
        "set -e",
        "cat > dsdoctor.hosts <<'EOF'",
        *lines,
        "EOF",
        *([""] if site.interface else []),
        *(
            f"# DeepSpeed does not forward GLOO_*, and NCCL_* with GPUs only\n{line}"
            for line in _into_environment(site)[:1]
        ),
        *_into_environment(site)[1:],
        "",
        f'{command} --module dsdoctor.comm "$@"',
    ]
    return _text(body)


def _torchrun(site: Site) -> str:
    first = site.hosts[0][0] if site.hosts else "127.0.0.1"
    nodes = len(site.hosts) or 1
    same = {slots for _, slots in site.hosts} or {site.per_node}
    python = shlex.quote(site.python)
    body = [
        "#!/bin/bash",
        "# on every node: bash THIS_FILE NODE_RANK [--quick | --full], with NODE_RANK 0 on the first, 1 on the next",
        *(f"# {number}: {name}" for number, (name, _) in enumerate(site.hosts)),
        f'NODES="${{NODES:-{nodes}}}"',
        f'MASTER_ADDR="${{MASTER_ADDR:-{first}}}"',
        'MASTER_PORT="${MASTER_PORT:-29500}"',
        *_network(site),
        "",
        f'exec {python} -m torch.distributed.run --nnodes "$NODES" --nproc_per_node {max(same)} --node_rank "${{1:-0}}" \\',
        '  --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" -m dsdoctor.comm "${@:2}"',
    ]
    return _text(body)


def _k8s(site: Site) -> str:
    return K8S.format(
        nodes=site.nodes,
        per_node=site.per_node,
        limits=f"\n              nvidia.com/gpu: {site.per_node}"
        if site.gpus
        else f"\n              cpu: {site.per_node}",
        security='\n          securityContext: {capabilities: {add: ["IPC_LOCK"]}} # InfiniBand pins memory'
        if site.fabric
        else "",
    )


def _network(site: Site) -> list[str]:
    """What a script says about the network: the interface where there is a choice, and InfiniBand."""
    fabric = [f"# NCCL takes {', '.join(site.fabric)} by itself, unless NCCL_IB_DISABLE is set"] if site.fabric else []
    if site.interface is None:
        return fabric
    return [
        *fabric,
        "# several interfaces are here: this one has the default route; every node must have it",
        f"export NCCL_SOCKET_IFNAME=={site.interface}",
        f"export GLOO_SOCKET_IFNAME={site.interface}",
    ]


def _into_environment(site: Site) -> list[str]:
    """Lines that add the interface to .deepspeed_env where it does not stand there."""
    if site.interface is None:
        return []
    values = {"GLOO_SOCKET_IFNAME": site.interface, "NCCL_SOCKET_IFNAME": f"={site.interface}"}
    return [
        f"grep -qs ^{name}= .deepspeed_env || echo {name}={value} >> .deepspeed_env" for name, value in values.items()
    ]


def _text(*parts: list[str]) -> str:
    return "\n".join(line for part in parts for line in part) + "\n"


K8S = """\
# kubectl apply -f THIS_FILE && kubectl logs -f job/dsdoctor-comm; the nodes find each other by the headless service
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
              -m dsdoctor.comm
          resources:
            limits:{limits}{security}
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
RECIPES: tuple[tuple[str, Callable[[Site], str]], ...] = (
    ("slurm", _slurm),
    ("hostfile", _hostfile),
    ("torchrun", _torchrun),
    ("k8s", _k8s),
)
