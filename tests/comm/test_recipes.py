"""The recipe for Kubernetes is read by a YAML reader, and filled with what is known of the nodes."""

from typing import Any

import pytest

from dsdoctor.comm.launch.recipes import Site, look_site, recipe
from dsdoctor.core.errors import UsageError
from tests.conftest import Disk


@pytest.mark.parametrize("gpus", [True, False])
def test_the_kubernetes_recipe_is_a_service_and_a_job(*, gpus: bool) -> None:
    yaml = pytest.importorskip("yaml")

    service, job = yaml.safe_load_all(recipe("k8s", Site(per_node=8, gpus=gpus, nodes=16)))

    pod: Any = job["spec"]["template"]["spec"]
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pod["subdomain"], "None")
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (16, "Indexed")
    assert pod["containers"][0]["resources"]["limits"] == ({"nvidia.com/gpu": 8} if gpus else {"cpu": 8})
    assert "--nproc_per_node 8 --node_rank" in pod["containers"][0]["args"][0]


def test_a_recipe_that_is_none_is_refused_with_the_one_there_is() -> None:
    with pytest.raises(UsageError) as caught:
        recipe("pbs", Site(per_node=2, gpus=False))

    assert caught.value.hint.startswith("take k8s")


def test_a_site_is_a_hostfile_or_two_nodes(disk: Disk) -> None:
    files = {
        "/dev/nvidia0": "",
        "/dev/nvidia1": "",
        "/job/hosts": "n1 slots=4\n$(reboot) slots=9\nn2 slots=4\nn3 slots=2\n",
    }
    host = disk(files)

    assert look_site(host) == Site(per_node=2, gpus=True, nodes=2)
    assert look_site(host, hostfile="/job/hosts") == Site(per_node=4, gpus=True, nodes=3)
    assert look_site(disk({}), nproc=3) == Site(per_node=3, gpus=True, nodes=2)
