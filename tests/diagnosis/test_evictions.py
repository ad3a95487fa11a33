"""Why Kubernetes evicted a pod is told, and that the run did nothing wrong is not: it may have filled the disk."""

from __future__ import annotations

from tests.diagnosis.reading import diagnose
from tests.each import each

OF_A_POD = {
    "The node was low on resource: ephemeral-storage. Threshold quantity: 53687091200": "ephemeral-storage",
    "The node was low on resource: nodefs-inodes. ": "nodefs-inodes",
    "The node was low on resource: memory. Container trainer was using 812Gi": "memory",
    "Pod ephemeral local storage usage exceeds the total limit of containers 50Gi. ": "50Gi",
    'Container trainer exceeded its local ephemeral storage limit "20Gi". ': "20Gi",
    'Usage of EmptyDir volume "dshm" exceeds the limit "8Gi". ': "dshm",
    "The node had condition: [DiskPressure]. ": "DiskPressure",
    "": "resource",
}
"""What a pod says of its eviction, and a word of the verdict."""


@each("message", OF_A_POD)
@each("signalled", [True, False])
def test_an_evicted_pod_is_told_with_what_there_was_too_little_of(message: str, *, signalled: bool) -> None:
    pod = ["Status:           Failed", "Reason:           Evicted", f"Message:          {message}"]
    signal = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15"
    log = [*(f"step {number}/900 loss 1.{number}" for number in range(1, 9)), *[signal] * signalled, *pod]
    first = diagnose(log).findings[0]

    assert OF_A_POD[message] in first.title
    assert "nothing in the run" not in first.title
