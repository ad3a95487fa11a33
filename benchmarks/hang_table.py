"""The figures of benchmarks.hang -> the table on docs/commands/hang.md: ``python -m benchmarks.hang_table FILE``."""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

WORDS = {
    "loader": "its dataset never returns the next item",
    "worker": "a worker of its data loader never returns an item",
    "skipped_step": "skips a batch (`continue`)",
    "save_alone": "calls `save_checkpoint` alone",
    "other_collective": "calls `all_gather`, the others call `all_reduce`",
    "other_shape": "calls `all_reduce` with other sizes",
    "swallowed": "catches an exception and continues",
    "exit_0": "`sys.exit(0)`",
    "exit_early": "`os._exit(0)`",
    "stopped": "SIGSTOP",
    "killed": "`kill -9`",
    "interpreter": "a deadlock in C that holds the GIL",
    "lock": "waits for a lock that another thread holds",
    "sleeps": "`time.sleep`",
    "pipe": "reads from a pipe without a writer",
    "stale_lock": "waits for an extension's lock, left by a killed launch",
    "full_disk_swallowed": "its disk is full during a save, and it continues",
    "frozen_disk": "writes to a file system that does not respond (D state)",
    "handled": "never finishes handling an exception",
    "uneven": "has fewer batches",
    "joins": "joins a thread that never ends",
    "server": "queries a server that does not respond",
    "waits_for_child": "waits for a child process",
    "group_alone": "creates a process group alone",
    "other_order": "calls the collectives of two groups in another order",
    "receives": "calls `recv` for a rank that sends nothing",
    "unused": "its forward skips a layer under DDP",
    "experts": "its batch needs one more expert under ZeRO-3",
    "evaluates_alone": "evaluates alone under ZeRO-3",
}
LONGEST = 150


def rows(document: dict[str, Any]) -> list[str]:
    alone = {result["kind"]: result for result in document.get("alone", ())}
    made: dict[str, list[dict[str, Any]]] = {}
    for result in document["cases"]:
        if result["kind"] in WORDS:
            made.setdefault(result["kind"], []).append(result)
    return [row(kind, results, alone.get(kind), document["timeout_alone"]) for kind, results in made.items()]


def row(kind: str, results: list[dict[str, Any]], alone: dict[str, Any] | None, timeout: float) -> str:
    good = [result for result in results if result["judged"] == "ok"]
    seconds = [result["told"] for result in good if result["told"]]
    span = f"{min(seconds):.1f} to {max(seconds):.1f} (median {statistics.median(seconds):.1f})" if seconds else "-"
    results = [result for result in results if result["judged"] != "no hang"]
    return f"| {WORDS[kind]} | {len(good)} of {len(results)} | {span} | {said(alone, timeout)} |"


def said(alone: dict[str, Any] | None, timeout: float) -> str:
    if alone is None:
        return "-"
    if alone["told"] is None and alone["ends"] and not any(alone["ends"]):
        return "nothing: exit status 0, although the calls did not match"
    if alone["told"] is None:
        return f"nothing within {timeout + 15:.0f} s"
    when = f"{alone['told']:.1f} s" if alone["told"] < timeout else "at its timeout"
    return f"{when}: {quoted(alone['verdict']) or 'no message'}"


def quoted(text: str) -> str:
    """A printed line without what differs from run to run, as code in a table's cell."""
    text = re.sub(
        r"/\S+/(?=[\w-]+/lock)", "", re.sub(r" \(\w+, pid \d+\)", "", re.sub(r"\s+\[hang-[\w-]+\]$", "", text))
    )
    text = re.sub(r"\[/[^\]]*\]\s*|\[127\.0\.0\.1\]:\d+", "", text)
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 2]} …"
    text = text.replace("|", "\\|").replace("`", "'").strip()
    return f"`{text}`" if text else ""


def main() -> None:
    print("| what one rank does | named | seconds | torch alone |", "|---|---|---|---|", sep="\n")
    print(*rows(json.loads(Path(sys.argv[1]).read_text())), sep="\n")


if __name__ == "__main__":
    main()
