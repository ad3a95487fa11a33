"""The server for agents: what a real client of the protocol gets through it, and what it refuses."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LOG = Path(__file__).parents[1] / "diagnosis" / "real" / "checkpoint-missing-shard.log"
SERVER = [sys.executable, "-m", "dsdoctor", "mcp"]


def answers(folder: Path, *calls: tuple[str, dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The tools that a server has which was started in a folder, and its results of these calls."""
    from mcp import Client, StdioServerParameters, stdio_client

    async def ask() -> tuple[list[Any], list[Any]]:
        parameters = StdioServerParameters(command=SERVER[0], args=SERVER[1:], cwd=folder, env=dict(os.environ))
        async with Client(stdio_client(parameters)) as client:
            tools = (await client.list_tools()).tools
            return tools, [await client.call_tool(name, given) for name, given in calls]

    return asyncio.run(ask())


@pytest.mark.slow
def test_a_client_gets_the_documents_of_the_commands(tmp_path: Path) -> None:
    (tmp_path / "mcp.py").write_text("raise SystemExit('a module of the folder')")
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the folder')")
    tools, (by_path, by_text, page) = answers(
        tmp_path,
        ("diagnose", {"path": str(LOG)}),
        ("diagnose", {"text": LOG.read_text(encoding="utf-8")}),
        ("explain", {"rule": "cuda-home-wrong"}),
    )
    told = json.loads(
        subprocess.run([*SERVER[:-1], "diagnose", str(LOG), "--json"], capture_output=True, text=True).stdout
    )

    assert [tool.name for tool in tools] == ["diagnose", "check", "config", "memory", "checkpoint", "hang", "explain"]
    assert all(tool.annotations.read_only_hint and len(tool.description.splitlines()[0]) <= 132 for tool in tools)
    assert by_path.structured_content == {"exit_status": 1, **told}
    assert by_text.structured_content["findings"] == told["findings"]
    assert "CUDA_HOME" in page.structured_content["manual"]


@pytest.mark.slow
def test_what_is_no_path_or_rule_becomes_no_option_and_runs_nothing(tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef make(): pass\n")
    (tmp_path / "ds_config.json").write_text("{}")
    config = str(tmp_path / "ds_config.json")
    _, refused = answers(
        tmp_path,
        ("explain", {"rule": "--list"}),
        ("diagnose", {"path": "--help"}),
        ("diagnose", {"path": "x", "text": "y"}),
        ("diagnose", {}),
        ("config", {"path": ""}),
        ("config", {"path": config, "hf": str(tmp_path / "absent.json")}),
        ("memory", {"config": config, "model": f"{script}:make", "world": 1}),
        ("memory", {"config": config, "model": str(script), "world": 1}),
        ("checkpoint", {"path": str(tmp_path / "absent")}),
    )

    assert [result.is_error for result in refused] == [True] * len(refused)
    assert not (tmp_path / "ran").exists()
    assert all(len(result.content[0].text) > 20 for result in refused)


@pytest.mark.slow
def test_without_the_library_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "mcp").mkdir()
    (tmp_path / "mcp" / "__init__.py").write_text("raise ImportError('not here')")
    done = subprocess.run(SERVER, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})

    assert (done.returncode, done.stdout) == (3, "")
    assert 'python -m pip install "dsdoctor[mcp]"' in done.stderr
