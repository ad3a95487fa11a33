"""Which rules match which logs of the corpora, and which logs need them: ``python benchmarks/rule_coverage.py RESULTS.json``.

Every log is read twice: with all rules, and with none, where only the general answer is left (the first exception,
a library's own sentence, how a process ended). ``needed`` counts the logs whose first answer is the rule's and that have
none without any rule; ``matched`` and ``first`` count ``tests/diagnosis/logs`` too, whose answers are their names. Whether
an answer names the cause is judged by its words, as ``tests/diagnosis/score.py`` does, quoted ones too: it says nothing of
the fix, which only a rule gives. Logs of the closed half are counted and never named.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsdoctor.core.finding import Severity
from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.diagnosis.diagnose import diagnosis_of
from dsdoctor.diagnosis.lines import raw_lines
from dsdoctor.diagnosis.models import Diagnosis
from dsdoctor.diagnosis.scan import INDEX, Patterns, index, scan
from tests.diagnosis.score import CORPORA, HERE, holds, says, verdict_text


def is_answered(diagnosis: Diagnosis, answer: dict[str, Any]) -> bool:
    """Whether the first verdict names the cause, in words of a rule or in the log's own."""
    verdicts = [finding for finding in diagnosis.findings if finding.severity is not Severity.NOTE]
    if not verdicts:
        return False
    with_evidence = " ".join([verdict_text(verdicts[0]), *verdicts[0].evidence]).lower()
    if "say" in answer:
        return says(with_evidence, answer["say"])
    if "accept" in answer:
        return holds(with_evidence, answer["accept"])
    return holds(with_evidence, [answer["must_mention"]])


def answers(corpus: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each log of a corpus with its answer, which is empty where the corpus has none."""
    listed = HERE / corpus / "answers.json"
    if not listed.is_file():
        yield from ((file, {}) for file in sorted((HERE / corpus).glob("*.log")))
        return
    for answer in json.loads(listed.read_text(encoding="utf-8")):
        yield HERE / corpus / answer["file"], answer


def main() -> None:
    """Write the table, and print the sums."""
    every, none = Patterns(INDEX), Patterns(index([]))
    rows = {rule: {"matched": 0, "first": 0, "needed": 0, "logs": []} for rule in RULES}
    sums: dict[str, int] = defaultdict(int)
    for corpus in (*CORPORA, "logs"):
        for file, answer in answers(corpus):
            with file.open("rb") as log:
                read = scan(raw_lines(log), every)
            matched = {hit.rule.id for hit in read.hits.values()}
            diagnosis = diagnosis_of(read)
            first = next((one.rule for one in diagnosis.findings if one.severity is not Severity.NOTE), "")
            needs_rule = False
            if answer.get("cause") is not None:
                with file.open("rb") as log:
                    bare = diagnosis_of(scan(raw_lines(log), none))
                with_rules, without = (is_answered(one, answer) for one in (diagnosis, bare))
                needs_rule = with_rules and not without
                sums["failed logs with an answer"] += 1
                sums["answered with rules"] += with_rules
                sums["answered without any rule"] += without
            sums["logs"] += 1
            for rule in matched | ({first} & RULES.keys()):
                row: dict[str, Any] = rows[rule]
                row["matched"] += rule in matched
                row["first"] += rule == first
                row["needed"] += rule == first and needs_rule
                if answer.get("half") != "closed":
                    row["logs"].append(f"{corpus}/{file.name}")
    sums["rules"] = len(rows)
    sums["rules that matched no line"] = sum(not row["matched"] and not row["first"] for row in rows.values())
    sums["rules that are never the first answer"] = sum(not row["first"] for row in rows.values())
    sums["rules that no log needs"] = sum(not row["needed"] for row in rows.values())
    Path(sys.argv[1]).write_text(json.dumps({"sums": sums, "rules": rows}, indent=1) + "\n")
    print("\n".join(f"{name:<40}{count:>6}" for name, count in sums.items()))


if __name__ == "__main__":
    main()
