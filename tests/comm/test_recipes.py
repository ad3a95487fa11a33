"""The Job for Kubernetes on the page of comm is read by a YAML reader."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "commands" / "comm.md"


def test_the_kubernetes_recipe_is_a_service_and_a_job_with_the_same_numbers_everywhere() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)

    service, job = yaml.safe_load_all(text)

    pod: Any = job["spec"]["template"]["spec"]
    command = pod["containers"][0]["args"][0]
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pod["subdomain"], "None")
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (2, 2, "Indexed")
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert "--nnodes 2 --nproc_per_node 8 --node_rank" in command
    assert "--master_addr dsdoctor-comm-0.dsdoctor-comm" in command
    assert "-m dsdoctor.comm --json" in command
