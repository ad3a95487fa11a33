"""A GPU that is full because of other processes -> a hit that names them, with what they hold."""

import re
from collections.abc import Iterator
from dataclasses import replace

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.combined_hit import combined_hit
from dsdoctor.diagnosis.gpu_memory import OtherProcesses, held_by_others
from dsdoctor.diagnosis.models import Facts, Hit, Line, Tier
from dsdoctor.diagnosis.scan import Scan

END_THE_OTHER = (
    "end the other process, or start on GPUs that are free (CUDA_VISIBLE_DEVICES, --include of deepspeed); a smaller batch does "
    "not free what it holds. Its number decides whose it is: if it is a rank of the same job, give each rank its own GPU, "
    "torch.cuda.set_device(LOCAL_RANK) before anything touches the GPU"
)
SEE = (step("nvidia-smi"), step("ps -o pid,user,etime,args -p {pid}"))
OF_THIS_JOB = rb"(?:subprocess|pid[=: ]{1,3}|PID[=: ]{1,3}|Process|process) {0,2}%s\b(?! has )"
"""How launchers name the processes that they start."""


def gpu_held_by_another(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """The GPU is full because other processes are on it: neither fragmentation nor this process alone."""
    for hit in hits:
        others = held_by_others(hit.text) if hit.rule.id == "gpu-oom" else None
        if others:
            title, groups = _title(others, scan)
            found = combined_hit("gpu-oom", Line(hit.line, hit.text), title, Tier.NAMED, groups)
            signature = replace(found.signature, fix=END_THE_OTHER, steps=SEE, sample=hit.signature.sample)
            yield replace(hit, signature=signature, groups=groups)
            return


def _title(others: OtherProcesses, scan: Scan) -> tuple[str, dict[str, str]]:
    """What is known of the other processes."""
    many = len(others.pids) > 1
    groups = {
        "who": "other processes hold" if many else "another process holds",
        "held": f"{others.held:.2f}",
        "own": f"{others.own:.2f}",
        "pids": f"process{'es' if many else ''} {', '.join(others.pids[:6])}",
        "whose": ", of this same run" if _is_of_this_run(others.pids, scan) else "",
        "pid": others.pids[0],
    }
    if others.among_them:
        return (
            "the GPU's memory is full: {pids} hold {held} GiB of it together{whose}, and this one is one of them",
            groups,
        )
    return "the GPU's memory is full, and {who} {held} GiB of it ({pids}{whose}; this one {own} GiB)", groups


def _is_of_this_run(pids: tuple[str, ...], scan: Scan) -> bool:
    """Whether the run's own launcher names the processes: two of its ranks are on one GPU."""
    known = {str(one.pid) for one in scan.timeline.exits if one.pid}
    named = [raw[-600:] for raw in scan.timeline.recent]
    return all(
        pid in known or any(re.search(OF_THIS_JOB % pid.encode(), raw) for raw in named if pid.encode() in raw)
        for pid in pids
    )
