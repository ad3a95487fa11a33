"""The figures of benchmarks.hang -> the table on docs/commands/hang.md: ``python -m benchmarks.hang_table FILE``."""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

WORDS = {
    "loader": "its dataset never gives the next item",
    "worker": "a worker of its data loader never does",
    "skipped_step": "it skips a batch (`continue`)",
    "save_alone": "it calls `save_checkpoint` alone",
    "other_collective": "it calls `all_gather`, the others `all_reduce`",
    "other_shape": "it calls `all_reduce` with other sizes",
    "swallowed": "it catches an exception and goes on",
    "exit_0": "`sys.exit(0)`",
    "exit_early": "`os._exit(0)`",
    "stopped": "SIGSTOP",
    "killed": "`kill -9`",
    "interpreter": "a deadlock in C that holds the GIL",
    "lock": "a lock that another thread has",
    "sleeps": "`time.sleep`",
    "pipe": "reads from a pipe into which nobody writes",
    "stale_lock": "the lock of an extension that a killed launch left",
    "full_disk_swallowed": "its disk is full while it saves, and it goes on",
    "frozen_disk": "writes to a file system that does not answer (D state)",
    "handled": "handles an exception for ever",
    "uneven": "has fewer batches",
    "joins": "joins a thread that does not end",
    "server": "asks a server that does not answer",
    "waits_for_child": "waits for a child process",
    "group_alone": "makes a process group alone",
    "other_order": "calls the collectives of two groups the other way round",
    "receives": "`recv` of a rank that sends nothing",
    "unused": "DDP, and its forward leaves a layer out",
    "experts": "ZeRO-3, and its batch needs one expert more",
    "evaluates_alone": "ZeRO-3, and it evaluates alone",
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
    shown = cleaned(good[-1]["verdict"]) if good else "-"
    return f"| {WORDS[kind]} | {len(good)} of {len(results)} | {span} | {shown} | {said(alone, timeout)} |"


def said(alone: dict[str, Any] | None, timeout: float) -> str:
    if alone is None:
        return "-"
    if alone["told"] is None and alone["ends"] and not any(alone["ends"]):
        return "nothing: it ends with status 0, though the calls did not belong together"
    if alone["told"] is None:
        return f"nothing within {timeout + 15:.0f} s"
    when = f"{alone['told']:.1f} s" if alone["told"] < timeout else "at its timeout"
    return f"{when}: {cleaned(alone['verdict']) or 'no word, it is gone'}"


def cleaned(text: str) -> str:
    """Without what differs from run to run, as a table's cell."""
    text = re.sub(
        r"/\S+/(?=[\w-]+/lock)", "", re.sub(r" \(\w+, pid \d+\)", "", re.sub(r"\s+\[hang-[\w-]+\]$", "", text))
    )
    text = re.sub(r"\[/[^\]]*\]\s*|\[127\.0\.0\.1\]:\d+", "", text)
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 2]} …"
    return text.replace("|", "\\|").replace("<", "&lt;").strip()


def main() -> None:
    print("| what one rank does | named | seconds | the verdict | torch alone |", "|---|---|---|---|---|", sep="\n")
    print(*rows(json.loads(Path(sys.argv[1]).read_text())), sep="\n")


if __name__ == "__main__":
    main()
