"""What a check found -> thirty lines of Markdown at most, to be pasted into an issue. What an environment hides is not in them."""

import re
from collections.abc import Callable, Iterator, Mapping

from dsdoctor.commands.check_ops import Checked
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.redaction import Hidden
from dsdoctor.core.version import __version__
from dsdoctor.report.check import WORTH_A_LINE, op_lines, verdict_line
from dsdoctor.ui.screen import counted, most_harmful
from dsdoctor.ui.terminal import printable

MOST = 5
MARKDOWN = re.compile(r"([\\`*<\[\]])")
SEVERITIES = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def issue_lines(done: Checked, environment: Mapping[str, str]) -> Iterator[str]:
    """Verdict, what is here, the worst problems, the ops. ``environment`` is this process's, with the name of its user."""
    plain = _Plain(environment).text
    yield f"**`dsdoctor check`: {plain(verdict_line(done, verbose=True))}**"
    yield ""
    yield f"- dsdoctor {__version__}"
    yield from (f"- {plain(topic.summary)}" for topic in done.topics)
    worth = most_harmful(finding for finding in done.findings if finding.severity in WORTH_A_LINE)
    if worth:
        yield ""
        for finding in worth[:MOST]:
            yield from _problem(finding, plain)
        if left := worth[MOST:]:
            yield f"- and {counted(left)}: {', '.join(f'`{finding.rule}`' for finding in left)}"
    if done.source is not None:
        head, *groups = op_lines(done.ops, done.source, verbose=False)
        yield ""
        yield f"{plain(head)[:1].upper()}{plain(head)[1:]}"
        yield ""
        yield from (f"- {plain(line)}" for line in groups if not line.startswith(" "))


def _problem(finding: Finding, plain: Callable[[str], str]) -> Iterator[str]:
    yield f"- {SEVERITIES[finding.severity]} `{finding.rule}`: {plain(finding.title)}"
    if finding.evidence:
        yield f"  {plain(finding.evidence[0])}"


class _Plain:
    """Makes of a text what Markdown shows as it is, without what the environment hides, the home folder and who works here."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._hidden = Hidden(environment)
        self._home = environment.get("HOME", "").rstrip("/")
        names = {environment.get("USER", ""), environment.get("LOGNAME", "")} - {"", "root"}
        words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        self._names = re.compile(rf"(?<![\w.-])(?:{words})(?![\w.-])") if words else None

    def text(self, text: str) -> str:
        # before anything is escaped: what is hidden is found by its own spelling
        said = self._hidden.out_of(text)
        if self._home:
            said = said.replace(self._home, "~")
        said = self._names.sub("USER", said) if self._names else said
        return MARKDOWN.sub(r"\\\1", printable(said))
