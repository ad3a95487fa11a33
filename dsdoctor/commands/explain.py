"""Every rule that dsdoctor can name -> its manual page: those of the checks, of the log catalogue, and of building itself."""

import difflib
from collections.abc import Iterator
from dataclasses import replace

from dsdoctor import checks
from dsdoctor.comm import manual as comm
from dsdoctor.core.errors import UsageError
from dsdoctor.core.manual import ManualPage, page_lines, parse_page
from dsdoctor.diagnosis.catalogue.rules import RULES
from dsdoctor.diagnosis.models import Rule
from dsdoctor.diagnosis.templates import command, say
from dsdoctor.overflow.verdict import verdict
from dsdoctor.push import errors as problems

OF_BUILDING = {
    "op-cannot-be-built": """An op that was named cannot be built; the finding tells what stands in the way.

`dsdoctor check --op NAME` looks at it alone, `--deep` asks the compiler.""",
    "op-failed": """An op was compiled, and the compiler, the linker or the proof refused it.

The finding tells the first error and the log. `dsdoctor diagnose LOG` reads the log again.""",
    "op-does-not-load": """An installed op was imported with this torch, in a process of its own, and that failed.

The finding holds the loader's words: an undefined symbol is another torch's, a missing library one of the system's.
`dsdoctor verify --installed --load` tries them.""",
    "cache-entry-damaged": """A compiled op or a wheel in the cache is not what was stored: a byte, a size or a name differs.

It was removed, and the next build compiles it anew. If it comes again, look at the disk: `dsdoctor cache verify` reads every
byte.""",
    "wheel-not-published": """The wheel was built and proven, and could not be put into the index. It lies in the out folder.""",
    "op-not-in-wheel": """A wheel does not hold an op that was asked for with `dsdoctor pick --op`.""",
    "not-proven": """An op could not be loaded on this machine, for a reason that says nothing about the op: the NVIDIA driver's
library is not here, or the op is compiled for a level above this processor (--cpu, --node) and its import ended with SIGILL.

Everything else about it was proven. Load it on a machine that has what it needs.""",
    "not-asked": """A question about this machine could not be answered, so nothing that depends on it was judged.""",
    "variable-overridden": """A variable of your shell would steer a DeepSpeed build.

dsdoctor's own build does not see it: it sets its own, and the plan shows them. `pip install` and compilation at run
time do see it.""",
    "variable-reaches-nvcc": """nvcc itself reads NVCC_PREPEND_FLAGS and NVCC_APPEND_FLAGS.

Whoever starts it: dsdoctor leaves them alone, because sites need them, and says so.""",
    "cpu-not-on-node": """Host code was asked for that a machine named with --node cannot run: it would end with SIGILL.

Without --cpu the level is the best that all nodes have. Else name a lesser one, or build a wheel for each kind of node.""",
    "cpu-above-this-machine": """Host code is compiled for a level that this machine does not have.

A compiler needs none of the instructions that it writes, so the wheel is built. But to import an op is to run some of it: that may
end with SIGILL here, and the op's loading is proven only on a machine that has the level.""",
    "cpu-unknown-to-compiler": """The host compiler is older than the level that host code is to be compiled for.

The levels of x86-64 came with gcc 11 and clang 12, Arm's vectors of any length with gcc 10, armv9-a with gcc 12.""",
    "arch-unused": """GPU architectures were named for a build that compiles no GPU code.

torch is a CPU build, or --accelerator cpu was given. Whoever wants GPU ops builds for a CUDA build of torch.""",
    "wheel-not-installed": """The wheel was built and proven, and pip could not install it. It lies in the out folder.""",
    "ops-not-judged": """No DeepSpeed was at hand whose ops could be judged: none is installed, none was named, and the newest could
not be fetched. Name one with --source (a folder, an sdist or a version).""",
    "check-broken": """One of dsdoctor's checks failed by itself. The others are not touched by that.

Please report it, with the file that `dsdoctor record FILE` writes.""",
    "usage": """The command makes no sense as given.""",
    "dsdoctor": """dsdoctor itself could not do its work; the finding tells why.""",
    "empty-log": """The log holds nothing, or nothing but blank lines: a run that hangs, or one whose output went elsewhere.""",
    "unexplained-failure": """The log shows a failure that no rule explains. The first line that looks like an error is shown.""",
}


def manual(rule: str) -> str:
    """The manual page of a rule: a page for each place that tells of it. Raises UsageError for one that does not exist."""
    found = tuple(pages(rule))
    if not found:
        near = difflib.get_close_matches(rule, every_rule(), n=1)
        meant = f"did you mean {near[0]}?" if near else "dsdoctor explain --list names them all"
        raise UsageError(f"there is no rule {rule!r}", hint=meant)
    return "\n\n".join("\n".join([*([f"{where}:", ""] if where else []), *page_lines(page)]) for where, page in found)


def pages(rule: str) -> Iterator[tuple[str, ManualPage]]:
    """Where a rule is told of ("" for a check of the machine), and its page there."""
    if check := checks.checks().get(rule):
        yield "", parse_page(checks.manual(check))
    if told := RULES.get(rule):
        yield f"In a log ({told.stage.value})", _page_of(told)
    if page := verdict.manual_pages().get(rule):
        yield "Of a watched training", parse_page(page)
    if page := comm.manual_pages().get(rule):
        yield "Between ranks", parse_page(page)
    if rule in OF_BUILDING and rule not in checks.checks():
        yield "", parse_page(OF_BUILDING[rule])
    if page := problems.MANUAL.get(rule):
        yield "Of a push", parse_page(page)


def every_rule() -> tuple[str, ...]:
    """All rule ids, sorted."""
    return tuple(
        sorted(
            {*checks.checks(), *RULES, *verdict.manual_pages(), *comm.manual_pages(), *OF_BUILDING, *problems.MANUAL}
        )
    )


def _page_of(rule: Rule) -> ManualPage:
    """A log rule's page: its fix is the one that a finding shows, with what a log would fill in left general."""
    fix = [
        f"{say(rule.fix, {})}.",
        *(["", *(f"    $ {command(line, {})}" for line in rule.commands)] if rule.commands else []),
    ]
    return replace(parse_page(rule.manual), fix="\n".join(fix), since=rule.since)
