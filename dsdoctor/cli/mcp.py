"""The command that serves the commands that only look to agents and editors: mcp, a server of the Model Context Protocol."""

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.files import PRIVATE, write_text
from dsdoctor.core.host import Host, LocalHost
from dsdoctor.core.release import __version__

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

TIMEOUT_SECONDS = 900.0
"""The longest that a caller waits: a model of hundreds of billions of parameters is followed in minutes."""
MAX_TEXT_BYTES = 64 * 1024 * 1024
STARTS = "import sys; del sys.path[0]; from dsdoctor.cli import main; main()"
"""No module of the client's working folder is ours."""
UNABLE = {UsageError.exit_code, ImpossiblePlan.exit_code, 4, 5}
"""Exit statuses without a verdict: the caller is told why."""
INSTRUCTIONS = """\
dsdoctor finds out why DeepSpeed does not build, why training fails, hangs or runs out of memory, and whether a \
configuration, a model and a checkpoint fit together. Every tool reads and changes nothing. An answer is the document that the \
command of that name prints with --json, plus its exit_status: 0 healthy, 1 an error was found, 6 undecided. A finding has a rule, \
a severity, a title, evidence and a fix; the tool explain has the page of each rule."""


def mcp_command() -> None:
    """Serve dsdoctor to an agent or editor (Model Context Protocol).

    Its tools are diagnose, check, config, memory, checkpoint, hang and explain.
    The client starts this command and talks to it over stdin and stdout. The tools read files and ask the installed DeepSpeed;
    they change nothing and run no script. Needs the extra mcp.

    Example: dsdoctor mcp
    """
    server_of(LocalHost()).run("stdio")


def server_of(host: Host) -> "MCPServer":
    """The server with its tools. Raises ImpossiblePlan where its library is missing."""
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError as error:
        hint = 'python -m pip install "dsdoctor[mcp]"'
        raise ImpossiblePlan("mcp 2 or newer is not installed, which speaks the protocol", hint=hint) from error
    from mcp.types import ToolAnnotations

    server = MCPServer("dsdoctor", version=__version__, instructions=INSTRUCTIONS, log_level="ERROR")
    looks = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
    for tool in Tools(host).all():
        server.tool(annotations=looks)(tool)
    return server


class Tools:
    """What a caller may ask. Each argument becomes one word of a command, which can be no other option."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def all(self) -> tuple[Any, ...]:
        """Every tool."""
        return self.diagnose, self.check, self.config, self.memory, self.checkpoint, self.hang, self.explain

    def diagnose(self, path: str = "", text: str = "") -> dict[str, Any]:
        """Find the cause of a failed install, build, launch or training in its log: a file, a folder of one job's logs, or text.

        Give path or text. The answer has verdict (healthy, failed or undecided), and findings with the line, the cause and the fix.
        """
        if bool(path) == bool(text):
            raise _refusal("give either path or text")
        if path:
            return self._answer("diagnose", [_path(path)])
        if len(text.encode(errors="replace")) > MAX_TEXT_BYTES:
            raise _refusal(f"text is longer than {MAX_TEXT_BYTES >> 20} MiB: give the path of the log")
        with tempfile.TemporaryDirectory(prefix="dsdoctor-") as folder:
            file = Path(folder, "text.log")
            write_text(file, text, mode=PRIVATE, errors="replace")
            return self._answer("diagnose", [str(file)])

    def check(self) -> dict[str, Any]:
        """Check this machine for what keeps DeepSpeed from being built or from running, and list the ops that can be built."""
        return self._answer("check", [], without=("machine",))

    def config(self, path: str, world: int | None = None, hf: str = "", model: str = "") -> dict[str, Any]:
        """Check what DeepSpeed makes of a ds_config.json: keys that are misspelt, ignored or rejected, and batch sizes.

        world: data-parallel ranks. hf: a file of transformers' TrainingArguments. model: the model's config.json.
        """
        return self._answer("config", [_path(path), *_options(world=world, hf=_file(hf), model=_file(model))])

    def memory(
        self,
        config: str,
        model: str,
        gpus: str = "",
        world: int | None = None,
        batch: int | None = None,
        sequence: int | None = None,
        dtype: Literal["", "bf16", "fp16", "fp32"] = "",
        checkpointing: bool = False,
        search: bool = False,
    ) -> dict[str, Any]:
        """Estimate the memory that each rank of a training needs, whether it fits, and what to change.

        config: ds_config.json. model: a Hugging Face config.json or its folder. gpus: such as 8x80G. batch: micro batch per rank.
        sequence: tokens per sample. search: also find the largest micro batch that fits.
        """
        # FILE.py:FUNCTION would run that file
        if not Path(model).exists() or ".py" in Path(model).name:
            raise _refusal(f"model is {model!r}: it must be the path of a config.json, or of its folder")
        given = _options(
            config=_path(config),
            model=_path(model),
            gpus=gpus,
            world=world,
            batch=batch,
            sequence=sequence,
            dtype=dtype,
        )
        flags = [f"--{name}" for name, wanted in (("checkpointing", checkpointing), ("search", search)) if wanted]
        return self._answer("memory", [*given, *flags])

    def checkpoint(
        self, path: str, world: int | None = None, stage: int | None = None, deep: bool = False
    ) -> dict[str, Any]:
        """Inspect a checkpoint of DeepSpeed: what is in it, whether it is whole, and whether a planned run can load it.

        world, stage: of that run. deep: read every byte of its files, which takes as long as loading them.
        """
        flags = ["--deep"] if deep else []
        return self._answer("checkpoint", [_path(path), *_options(world=world, stage=stage), *flags])

    def hang(self, path: str) -> dict[str, Any]:
        """Find the rank that a hanging training waits for, and where it is blocked.

        path: the folder that dsdoctor.run wrote (dsdoctor-hang), or one of torch's flight recorder dumps.
        """
        return self._answer("hang", [_path(path)])

    def explain(self, rule: str) -> dict[str, Any]:
        """Show the page of a rule: what it means, why it matters, how to fix it. rule: the id that a finding names."""
        if not re.fullmatch("[a-z0-9][a-z0-9-]*", rule):
            raise _refusal(
                f"rule is {rule!r}: ids have lower-case letters, digits and hyphens, such as cuda-home-wrong"
            )
        return self._answer("explain", [rule])

    def _answer(self, command: str, words: Sequence[str], *, without: Sequence[str] = ()) -> dict[str, Any]:
        """The document of a command, in a process of its own. Raises the protocol's error where there is no verdict."""
        argv = [sys.executable, "-c", STARTS, command, *words, "--json"]
        answer = self._host.run(argv, timeout=TIMEOUT_SECONDS)
        try:
            document: Mapping[str, Any] = json.loads(answer.stdout)
        except ValueError:
            said = (answer.stderr or answer.stdout).strip().splitlines()[-1:]
            raise _refusal(f"{command} gave no answer: {''.join(said)[:500] or 'it did not end in time'}") from None
        if answer.returncode in UNABLE:
            first: Mapping[str, str] = next(iter(document["findings"]), {})
            raise _refusal(f"{first.get('title', command)}. {first.get('fix', '')}".strip())
        return {"exit_status": answer.returncode} | {
            name: part for name, part in document.items() if name not in without
        }


def _path(text: str) -> str:
    """A path as a word that is no option."""
    if not text or "\0" in text:
        raise _refusal("a path is empty")
    return str(Path(text).absolute())


def _file(text: str) -> str:
    return _path(text) if text else ""


def _options(**given: object) -> list[str]:
    """Options with their values, without those that were not given."""
    return [f"--{name}={value}" for name, value in given.items() if value not in {None, ""}]


def _refusal(message: str) -> Exception:
    """What the caller is told."""
    from mcp.server.mcpserver.exceptions import ToolError

    return ToolError(message)
