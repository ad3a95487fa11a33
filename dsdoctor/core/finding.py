"""What is wrong and what fixes it: findings, and the steps to type. Data only.

A step is a line of our own source with named places, ``{name}``, and the values for them, which may come from another rank, a
snapshot or a log. Values are quoted here, when a step is printed, and nowhere else: no value can become a part of the command, it
is one word, or it is not printed.
"""

import enum
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dsdoctor.core.release import page_address

FIELD = re.compile(r"(?P<start>(?<![^\s(]))?\{(?P<name>\w+)(?:\|(?P<without>[^{}]*))?\}")
"""A place for a value; ``{name|text}`` says what stands there without one. ``start``: it begins a word."""
IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
SHELL_WORDS = re.compile(r"""[|&;<>$`*?~]|^\s*(?:\w+=|(?:export|unset|eval|source|ulimit|set|cd)\b)""")
QUOTED = re.compile(r"""'[^']*'|"[^"$`]*\"""")
PLATFORMS = {
    "apt": "Debian, Ubuntu",
    "apt-get": "Debian, Ubuntu",
    "dnf": "Fedora, RHEL",
    "conda": "conda",
}
DELETING, REPLACING = {"rm", "rmdir"}, {"--force-reinstall", "-U", "--upgrade", "mv"}


class Follows(enum.Enum):
    """How a step stands to the one before it: after it, or instead of it."""

    THEN = "then"
    ALTERNATIVE = "or"


class Risk(enum.Enum):
    """What a step may cost."""

    DELETES = "deletes"
    REPLACES = "replaces"
    ROOT = "needs root"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command. ``template`` and ``note`` are literals of our own source (a test sees to it), ``values`` may be anybody's.

    A place stands outside of quotes. ``{variable}`` takes the name of a variable only: ``unset 'a[$(id)]'`` runs ``id``.
    """

    template: str
    values: tuple[tuple[str, str | tuple[str, ...]], ...] = ()
    follows: Follows = Follows.THEN
    note: str = ""
    argv: tuple[str, ...] | None = field(init=False)
    """The program and its arguments; None where it takes a shell (``export``, a pipe, ``$HOME``)."""
    platform: str = field(init=False)
    """The system whose package manager it calls, "" for all."""
    risks: tuple[Risk, ...] = field(init=False)

    def __post_init__(self) -> None:
        words = self.template.split()
        found = {Risk.DELETES: DELETING, Risk.REPLACES: REPLACING, Risk.ROOT: {"sudo"}}
        derived = {
            "argv": self._argv(),
            "platform": next((PLATFORMS[word] for word in words if word in PLATFORMS), ""),
            "risks": tuple(risk for risk, marks in found.items() if not marks.isdisjoint(words)),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def line(self) -> str:
        """The command for a shell.

        >>> step("ls -ld {path|~/.cache}", path="/x; rm -rf /").line
        "ls -ld '/x; rm -rf /'"
        >>> step("ping -c 3 {host}", host="-f").line  # would be an option
        'ping -c 3 HOST'
        """
        values = dict(self.values)
        return FIELD.sub(lambda found: _printed(found, values.get(found["name"])), self.template)

    @property
    def printed(self) -> str:
        """The line, and behind it for whom it is.

        >>> step("sudo apt-get install libaio-dev", note="1.0 or newer").printed
        'sudo apt-get install libaio-dev  # Debian, Ubuntu: 1.0 or newer'
        """
        platform = "" if self.platform in self.template else self.platform
        remark = ": ".join(part for part in (platform, self.note) if part)
        return f"{self.line}  # {remark}" if remark else self.line

    def _argv(self) -> tuple[str, ...] | None:
        if SHELL_WORDS.search(QUOTED.sub("", FIELD.sub("", self.template))):
            return None
        return tuple(shlex.split(self.line))

    def filled(self, values: Mapping[str, str]) -> "Step":
        """The same step with these values."""
        return replace(self, values=tuple(values.items()))


def step(template: str, *, note: str = "", **values: str | int | Iterable[str]) -> Step:
    """A step after the one before it.

    >>> step("pip install {name}", name="a b").argv
    ('pip', 'install', 'a b')
    """
    return Step(template=template, note=note, values=_given(values))


def alternative(template: str, *, note: str = "", **values: str | int | Iterable[str]) -> Step:
    """Another way to do what the step before it does."""
    return Step(template=template, note=note, values=_given(values), follows=Follows.ALTERNATIVE)


def with_options(command: Step, options: Iterable[Step]) -> Step:
    """A step with options behind it, each written as a step of its own; an option may stand there twice.

    >>> with_options(step("ls -l"), [step("--hide {name}", name="a b"), step("--hide {name}", name="c")]).line
    "ls -l --hide 'a b' --hide c"
    """
    for number, option in enumerate(options):
        template = FIELD.sub(lambda found, number=number: f"{{{found['name']}_{number}}}", option.template)  # type: ignore[misc]
        values = tuple((f"{name}_{number}", value) for name, value in option.values)
        command = replace(command, template=f"{command.template} {template}", values=(*command.values, *values))
    return command


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One sentence, then steps."""

    text: str
    steps: tuple[Step, ...] = ()
    commands: tuple[str, ...] = field(init=False)
    """The steps as lines that can be pasted into a shell."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "commands", tuple(step.printed for step in self.steps))


def fix_for_python(fix: Fix, python: str) -> Fix:
    """The fix for another interpreter's environment than the one that runs dsdoctor.

    >>> fix = Fix(text="t", steps=(step('eval "$(python -m dsdoctor env)"'), step("python -m pip install x")))
    >>> print(*fix_for_python(fix, "/a b/python").commands, sep="\\n")
    eval "$(python -m dsdoctor env --python '/a b/python')"
    '/a b/python' -m pip install x
    """
    ours = re.compile(r"(\bpython -m dsdoctor (?:build-wheel|install|toolkit|env|check))\b(?! --python)")
    pip = re.compile(r"^python -m pip\b")
    return replace(fix, steps=tuple(_with_python(step, ours, pip, python) for step in fix.steps))


def _with_python(step: Step, ours: re.Pattern[str], pip: re.Pattern[str], python: str) -> Step:
    template = pip.sub("{python} -m pip", ours.sub(r"\1 --python {python}", step.template))
    if template == step.template:
        return step
    return replace(step, template=template, values=(*step.values, ("python", python)))


def _given(values: Mapping[str, str | int | Iterable[str]]) -> tuple[tuple[str, str | tuple[str, ...]], ...]:
    return tuple(
        (name, str(value) if isinstance(value, (str, int)) else tuple(map(str, value)))
        for name, value in values.items()
    )


def _printed(found: re.Match[str], value: str | tuple[str, ...] | None) -> str:
    """A value as a word, or its name in capitals where there is none or it cannot be pasted."""
    name, without = found["name"], found["without"]
    if value is None:
        return name.upper() if without is None else without
    words = (value,) if isinstance(value, str) else value
    if not all(_pasteable(name, word, starts=found["start"] is not None) for word in words):
        return name.upper()
    return " ".join(map(shlex.quote, words))


def _pasteable(name: str, word: str, *, starts: bool) -> bool:
    """Whether a value can stand in a command as one word: no option, no control characters (nor bidirectional ones)."""
    if name == "variable":
        return IDENTIFIER.fullmatch(word) is not None
    return word.isprintable() and not (starts and word.startswith("-"))


class Severity(enum.Enum):
    """How much a finding matters: a NOTE informs, a WARNING may cause trouble later, an ERROR stands in the way."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem. ``rule`` is its id, which is never reused; ``affects`` names the ops that it stands in the way of,
    ``ranks`` the ranks that it blames: of two that cannot be told apart, both.
    """

    rule: str
    severity: Severity
    title: str
    evidence: tuple[str, ...] = ()
    affects: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    fix: Fix | None = None
    url: str = field(init=False, compare=False, repr=False, default="")
    """The address of its rule's page."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", page_address(self.rule))

    @classmethod
    def error(
        cls,
        rule: str,
        title: str,
        *,
        evidence: Iterable[str] = (),
        affects: Iterable[str] = (),
        fix: str = "",
        steps: Iterable[Step] = (),
    ) -> "Finding":
        """It stands in the way."""
        return cls._of(Severity.ERROR, rule, title, evidence, affects, fix, steps)

    @classmethod
    def warning(
        cls,
        rule: str,
        title: str,
        *,
        evidence: Iterable[str] = (),
        affects: Iterable[str] = (),
        fix: str = "",
        steps: Iterable[Step] = (),
    ) -> "Finding":
        """It may cause trouble later, or stands in the way of some ops only."""
        return cls._of(Severity.WARNING, rule, title, evidence, affects, fix, steps)

    @classmethod
    def note(
        cls,
        rule: str,
        title: str,
        *,
        evidence: Iterable[str] = (),
        affects: Iterable[str] = (),
        fix: str = "",
        steps: Iterable[Step] = (),
    ) -> "Finding":
        """It informs."""
        return cls._of(Severity.NOTE, rule, title, evidence, affects, fix, steps)

    @classmethod
    def _of(
        cls,
        severity: Severity,
        rule: str,
        title: str,
        evidence: Iterable[str],
        affects: Iterable[str],
        fix: str,
        steps: Iterable[Step],
    ) -> "Finding":
        return cls(
            rule=rule,
            severity=severity,
            title=title,
            evidence=tuple(evidence),
            affects=tuple(affects),
            fix=Fix(text=fix, steps=tuple(steps)) if fix else None,
        )


def for_python(finding: Finding, python: str) -> Finding:
    """The finding with its steps for another interpreter's environment than the one that runs dsdoctor."""
    return replace(finding, fix=fix_for_python(finding.fix, python)) if finding.fix else finding


def has_error(findings: tuple[Finding, ...]) -> bool:
    """Whether any finding stands in the way.

    >>> has_error((Finding(rule="r", severity=Severity.WARNING, title="t"),))
    False
    """
    return any(finding.severity is Severity.ERROR for finding in findings)
