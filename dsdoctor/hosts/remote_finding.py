"""A finding that another host sent -> one of ours. Its commands are told, and never offered to be pasted: anybody may
have written them, and JSON of others cannot make a Step of this type."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.core.finding import Finding, Fix, Severity


@dataclass(frozen=True, kw_only=True)
class RemoteFix:
    """A fix as it arrives: a sentence and lines."""

    text: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RemoteFinding:
    """A finding as it arrives. Fields that other releases of dsdoctor have are passed over."""

    rule: str
    severity: Severity
    title: str
    evidence: tuple[str, ...] = ()
    affects: tuple[str, ...] = ()
    fix: RemoteFix | None = None

    def ours(self) -> Finding:
        """The finding without a step.

        >>> fix = RemoteFix(text="install it", commands=("pip install x",))
        >>> RemoteFinding(rule="r", severity=Severity.NOTE, title="t", fix=fix).ours().evidence
        ('it advises: pip install x',)
        """
        return Finding(
            rule=self.rule,
            severity=self.severity,
            title=self.title,
            evidence=tuple(self._told()),
            affects=self.affects,
            fix=Fix(text=self.fix.text) if self.fix else None,
        )

    def _told(self) -> Iterator[str]:
        for text in self.evidence:
            told = text.strip()
            # "$" at the beginning of a line is the mark of our own commands
            yield f"it says: {told}" if told.startswith("$") else text
        for command in self.fix.commands if self.fix else ():
            yield f"it advises: {command}"
