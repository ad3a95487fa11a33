"""Hits of a log -> hits in the light of other lines: of several lines together, of another package, of the releases in the log."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dsdoctor.diagnosis.catalogue import READ, REGRESSION_OF, RULES, Event, Signature, Stage, Tier
from dsdoctor.diagnosis.findings import ANOTHER_PACKAGE, book_steps, steps_of_case
from dsdoctor.diagnosis.lines import Line
from dsdoctor.diagnosis.models import Facts, Hit
from dsdoctor.diagnosis.relations import Story, trained_after
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.timeline import FINITE, LOSS, STEP, Failure, Frame, Speaker
from dsdoctor.rules.store import Table, forms


def contradicted(hit: Hit, facts: Facts) -> bool:
    """Whether the log names a version that does not have this fault, or names none where only the version tells."""
    regression = REGRESSION_OF.get(hit.signature)
    if regression is None:
        return False
    if regression.stages and facts.zero_stage and facts.zero_stage not in regression.stages:
        return True
    version = getattr(facts, READ[regression.package]) if regression.package in READ else None
    if not version:
        return regression.needs_version
    here = _numbers(version)
    too_old = bool(regression.first) and here < _numbers(regression.first)
    return too_old or (bool(regression.last) and here > _numbers(regression.last))


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version.

    >>> _numbers("0.16.5+cu121")
    (0, 16, 5)
    """
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


# A hit in the build of another package than DeepSpeed -> the same hit in words, and with a fix, of that package.
A_BUILD = {Stage.INSTALL, Stage.COMPILE, Stage.LINK}

DEEPSPEEDS_OWN = re.compile(
    r"\b(?:deepspeed|DeepSpeed|op_builder|pre-compil|DS_[A-Z]{2,}|ds_accelerator|Install Ops|fused_adam is)"
)
"""Words that only DeepSpeed's own setup and ops print."""

BUILDS_DEEPSPEED = re.compile(r"python -m dsdoctor (?:install|build-wheel)|pip install .{0,80}\bdeepspeed\b|DS_BUILD_")

PIPS_OWN = "pip-other-wheel-failed"

BUILT_OTHERWISE = {"apex", "transformer-engine"}  # packages that are not installed by their name on PyPI


def of_its_package(hit: Hit, facts: Facts) -> Hit:
    """The hit, about the package that was being built; as it is where that is DeepSpeed, or not known."""
    project = hit.project if hit.project is not None else facts.project
    if not project or project == "deepspeed" or hit.rule.stage not in A_BUILD or DEEPSPEEDS_OWN.search(hit.text):
        return hit
    has_case = any(case.name == ANOTHER_PACKAGE for case in hit.rule.cases) and not hit.signature.fix
    told = hit.in_case(ANOTHER_PACKAGE) if has_case else hit
    signature = replace(
        told.signature,
        title=told.signature.title or hit.rule.title,
        fix=told.signature.fix or hit.rule.fix,
        steps=_its_steps(book_steps(hit), project, hit.rule.id),
    )
    rule = RULES[PIPS_OWN] if hit.rule.id == "deepspeed-setup-bug" else hit.rule
    return replace(hit, rule=rule, signature=signature, groups={**hit.groups, "project": project}, op=None)


def _its_steps(steps: tuple[str, ...], project: str, rule: str) -> tuple[str, ...]:
    """The steps, with those that build DeepSpeed replaced by the one that builds this package."""
    kept = [one for one in steps if not BUILDS_DEEPSPEED.search(one)]
    if len(kept) == len(steps):
        return steps
    if rule == "compiler-oom-killed":
        own = steps_of_case(RULES[PIPS_OWN], case="one-compiler")
    elif project in BUILT_OTHERWISE:
        own = steps_of_case(RULES[PIPS_OWN], case=project)
    else:
        own = steps_of_case(RULES[PIPS_OWN], case="without-isolation")
    before = steps_of_case(RULES[PIPS_OWN], case="torch-first") if rule == "torch-missing-at-build" else ()
    return (*before, *kept, *own)


# The message of torch's allocator that the GPU is full -> who holds the memory. Judges by its figures alone.
UNITS = {"KiB": 1 / 2**20, "MiB": 1 / 2**10, "GiB": 1.0}

SIZE = r"(?<![\d.])(\d{1,9}(?:\.\d{1,9})?) ([KMG]iB)"

TOTAL_MEMORY = re.compile(rf"total capac(?:i)?ty of {SIZE}")

FREE_MEMORY = re.compile(rf"of which {SIZE} is free")

OTHERS_MEMORY = re.compile(rf"Process (\d{{1,9}}) has {SIZE} memory in use")

OWN_MEMORY = re.compile(rf"this process has {SIZE} memory in use")

UNUSED_MEMORY = re.compile(rf"{SIZE} is reserved by PyTorch but unallocated")

ALLOCATED_MEMORY = re.compile(rf"{SIZE} is allocated by PyTorch")

MIN_FOREIGN_SHARE = 0.25  # from this share of the GPU on it matters what other processes hold
OF_CUDA = 1.5
"""Up to so many times of what torch holds a process may hold with CUDA's own context and NCCL's buffers."""


@dataclass(frozen=True, kw_only=True)
class OtherProcesses:
    """Other processes on the same GPU: their numbers, what they hold, and what the one that failed holds, in GiB.

    ``among_them``: the one that failed is one of them, and the message does not tell which.
    """

    pids: tuple[str, ...]
    held: float
    own: float
    among_them: bool = False


def held_by_others(text: str) -> OtherProcesses | None:
    """The other processes that hold more than all that this one left unused, and much of the GPU; None else.

    A container does not know its own number on the host: where the message names no "this process", it is the one of them
    that holds as much as torch says that it does, or a little more.

    >>> message = ("a total capacity of 79.25 GiB of which 410.94 MiB is free. Process 4711 has 44.71 GiB memory in use. "
    ...     "this process has 34.12 GiB memory in use. 1.20 GiB is reserved by PyTorch but unallocated")
    >>> held_by_others(message)
    OtherProcesses(pids=('4711',), held=44.71, own=34.12, among_them=False)
    >>> held_by_others(message.replace("44.71 GiB", "310.20 MiB")) is None
    True
    >>> message = message.replace("this process", "Process 12").replace("34.12", "9.12") + "; 7.50 GiB is allocated by PyTorch"
    >>> held_by_others(message)
    OtherProcesses(pids=('4711',), held=44.71, own=9.12, among_them=False)
    """
    total, own = _gib(TOTAL_MEMORY, text), _gib(OWN_MEMORY, text)
    others = [(pid, float(number) * UNITS[unit]) for pid, number, unit in OTHERS_MEMORY.findall(text)]
    mine = [] if own else _may_be_mine(others, _gib(ALLOCATED_MEMORY, text) + _gib(UNUSED_MEMORY, text))
    if len(mine) == 1:
        others, own = [one for one in others if one is not mine[0]], mine[0][1]
    if not others or not (own or mine) or not total:
        return None
    held = sum(size for _, size in others)
    foreign = held - max((size for _, size in mine), default=0.0) if len(mine) > 1 else held
    if foreign < MIN_FOREIGN_SHARE * total or foreign <= _gib(FREE_MEMORY, text) + _gib(UNUSED_MEMORY, text):
        return None
    return OtherProcesses(pids=tuple(pid for pid, _ in others), held=held, own=own, among_them=len(mine) > 1)


def _may_be_mine(processes: list[tuple[str, float]], torch: float) -> list[tuple[str, float]]:
    """The processes that torch's own figures may be of."""
    least = min((size for _, size in processes if size >= torch), default=0.0)
    return [one for one in processes if torch and torch <= one[1] <= max(least, torch * OF_CUDA)]


def _gib(pattern: re.Pattern[str], text: str) -> float:
    """A figure of the message in GiB; 0 where it is not told."""
    found = pattern.search(text)
    return float(found[1]) * UNITS[found[2]] if found else 0.0


# A finding that follows from several lines -> a hit of its rule, as if one line had said it.
def combined_hit(
    rule: str, line: Line, tier: Tier, groups: dict[str, str] | None = None, *, case: str = "", stands: bool = False
) -> Hit:
    """A hit that follows from several lines, in the words of its rule or of a case of it; ``stands``: it is true of the
    result, however well the log ended.
    """
    signature = Signature(pattern="", sample="", tier=tier, stands=stands)
    hit = Hit(rule=RULES[rule], signature=signature, line=line.number, text=line.text, groups=groups or {})
    return hit.in_case(case) if case else hit


# A case of a rule that the book gives a condition -> the hit in its words: where all of it holds, by the last such case.
def in_a_case(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """What else the log shows tells in which case of its rule a hit is."""
    for hit in hits:
        for case in reversed([case for case in hit.rule.cases if case.where]):
            if (values := _values_where(case.where, hit, scan)) is not None:
                yield replace(hit.in_case(case.name), groups={**hit.groups, **values})
                break


def _values_where(where: Table, hit: Hit, scan: Scan) -> dict[str, str] | None:
    """The values that a condition gives, None where it does not hold.

    ``line``: the hit has the pattern; ``seen``: one of the last lines has it, of several patterns each; ``failure``: the words or
    the calls of a failure; ``writer``: who wrote the hit. ``event``: the log shows it. ``project``: it was building one of these.
    """
    if "project" in where and (hit.project or "") not in where["project"]:
        return None
    if "event" in where and Event(where["event"]) not in scan.first:
        return None
    seen = [where["seen"]] if isinstance(where.get("seen"), str) else where.get("seen", ())
    searched: list[tuple[str, Iterable[str]]] = [(where["line"], [hit.text])] if "line" in where else []
    searched += [(where["writer"], (one.host for one in hit.speakers))] if "writer" in where else []
    searched += (
        [(where["failure"], (f"{one.text} {_calls(one)}" for one in scan.timeline.failures))]
        if "failure" in where
        else []
    )
    searched += [(one, (raw[-4000:].decode("utf-8", "replace") for raw in scan.timeline.recent)) for one in seen]
    values: dict[str, str] = {}
    for pattern, texts in searched:
        found = next(filter(None, (re.search(pattern, text) for text in texts)), None)
        if found is None:
            return None
        values |= {name: value for name, value in found.groupdict().items() if value}
    return values


def _calls(failure: Failure) -> str:
    """The functions that a process was in."""
    return " ".join(f"{frame.function} {frame.source}" for frame in failure.frames)


# A GPU that is full because of other processes -> a hit that names them, with what they hold.
def gpu_held_by_another(hits: list[Hit], _: Facts, __: Scan) -> Iterator[Hit]:
    """The GPU is full because other processes are on it: neither fragmentation nor this process alone."""
    for hit in (hit for hit in hits if hit.rule.id == "gpu-oom"):
        if others := held_by_others(hit.text):
            several = len(others.pids) > 1
            case = "one-of-several" if others.among_them else "other-processes" if several else "another-process"
            found = combined_hit("gpu-oom", Line(hit.line, hit.text), Tier.NAMED, case=case)
            groups = {
                "held": f"{others.held:.2f}",
                "own": f"{others.own:.2f}",
                "pids": f"process{'es' if several else ''} {', '.join(others.pids[:6])}",
                "pid": others.pids[0],
            }
            yield replace(hit, signature=replace(found.signature, sample=hit.signature.sample), groups=groups)
            return


CAUGHT = re.compile(r"Caught (?P<error>\w{1,60}) in DataLoader worker process \d")

WORKER_LINES = 100  # over how many lines the traceback of a worker may go on
CHOSE_THE_CPU = "accelerator-autodetect-cpu"

WITHOUT_CUDA = frozenset({"resource-filter-invalid", CHOSE_THE_CPU, "driver-missing"})

WITHOUT_THE_SERVER = frozenset({"hf-hub-unreachable", "pip-network", "pip-no-matching-version"})

FOLLOW_FROM = {
    "cuda-not-initialized": WITHOUT_CUDA,
    "driver-too-old": WITHOUT_CUDA,
    "driver-silent": WITHOUT_CUDA,
    "certificate-out-of-date": WITHOUT_THE_SERVER,
    "hf-hub-unreachable": frozenset({"hf-hub-unreachable"}),
}
"""What is told as an error because of something that only a warning had told."""

OFFLINE = re.compile(
    r"OfflineModeIsEnabled|[Oo]ffline mode is enabled|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|[Oo]utgoing traffic"
)

HOST = re.compile(r"\bhost='([\w.-]{4,80})'|https?://([\w.-]{4,80})")

OF_PIP = re.compile(r"/simple/(?P<name>[\w.-]{1,80})/")

WANTED = re.compile(r"requirement (?P<name>[\w.-]{1,80}).{0,200}\(from versions: none\)")

MET = re.compile(
    rb"attempts left|will restart|[Rr]estarting worker|worker group FAILED|[Cc]onnection (?:closed|reset)|[Bb]roken pipe"
    rb"|\[Rank \d|\[rank\d|SignalException|Sending process \d"
)

OWN_STATE = re.compile(r"\bself\.state\[\w{1,40}\]\[[\"']")

ZERO = re.compile(r"deepspeed[/\\]runtime[/\\](?:zero[/\\]|bf16_optimizer)")


def torch_without_the_gpu(hits: list[Hit], _: Facts, __: Scan) -> Iterator[Hit]:
    """No kernel for this GPU, and torch had said when it began that it was not built for it: no op is to be built anew."""
    of_the_rule = [hit for hit in hits if hit.rule.id == "no-kernel-image"]
    warned = next((hit for hit in of_the_rule if hit.tier is Tier.PROBE), None)
    failed = next((hit for hit in of_the_rule if hit.tier is Tier.NAMED and not hit.signature.title), None)
    if warned and failed and warned.line < failed.line:
        signature = replace(warned.signature, tier=Tier.NAMED, sample=failed.signature.sample)
        yield replace(failed, signature=signature, groups=warned.groups)


def warned_of_before(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """A warning, or a try that was repeated, had told the reason before what only follows from it."""
    for hit in hits:
        follows = FOLLOW_FROM.get(hit.rule.id, frozenset())
        warned = bool(follows) and (hit.tier is Tier.PROBE or hit.said)
        later = [other for other in hits if other.rule.id in follows and other.line > hit.line] if warned else []
        if any(other.tier is not Tier.PROBE and not other.aside and _fits(hit, other, hits, scan) for other in later):
            yield replace(hit, signature=replace(hit.signature, tier=Tier.NAMED), said=False, quoted=False)


def _fits(warned: Hit, hit: Hit, hits: list[Hit], scan: Scan) -> bool:
    """Whether what failed follows from what was warned of.

    Slots are missing because CUDA is, only where DeepSpeed counts those of the CPU. A server was not reached because of its
    certificate only if it is the same server, nobody had switched it off, and no training ran between.
    """
    if hit.rule.id == "resource-filter-invalid":
        return any(other.rule.id == CHOSE_THE_CPU for other in hits)
    if hit.rule.id in WITHOUT_CUDA:
        return True
    return not trained_after(Story(read=scan), Line(warned.line, warned.text)) and of_one_server(warned.text, hit.text)


def of_one_server(warned: str, failed: str) -> bool:
    """Whether a warning of a connection and what failed later are of the same server.

    >>> of_one_server("host='a.example', port=443", "We couldn't connect to 'https://a.example'")
    True
    >>> of_one_server("broken by 'SSLError()': /simple/torch/", "no version satisfies the requirement torch (from versions: 2.0)")
    False
    """
    if OFFLINE.search(failed):
        return False
    wanted = WANTED.search(failed)
    if wanted:
        package = OF_PIP.search(warned)
        return package is not None and _plain(package["name"]) == _plain(wanted["name"])
    return any((host[1] or host[2]) in failed for host in HOST.finditer(warned))


def _plain(name: str) -> str:
    """A package's name as an index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def raised_by_the_data(hits: list[Hit], __: Facts, scan: Scan) -> Iterator[Hit]:
    """A DataLoader's worker passed on what the data set raised: its own exception stands below, with its own frames."""
    for number, failure in enumerate(scan.timeline.failures):
        caught = CAUGHT.search(failure.text)
        inner = _inner(scan.timeline.failures[number + 1 :], failure, caught["error"]) if caught else None
        if caught and inner and not _is_known(inner, hits):
            words = inner.text.partition(": ")[2][:200] or inner.text
            at = f", at {inner.frame}" if inner.frame and inner.frame.own else ""
            groups = {"error": caught["error"], "words": words, "at": at}
            line = Line(inner.line, inner.text)
            told = combined_hit("data-worker-failed", line, Tier.NAMED, groups, case="data-set")
            yield replace(told, speaker=inner.speaker)
            return


def raised_while_a_table_was_made(hits: list[Hit], __: Facts, scan: Scan) -> Iterator[Hit]:
    """datasets only says that it could make no table: the exception for which it says so stands above, with its own frames."""
    for hit in (
        hit for hit in hits if hit.rule.id == "dataset-unreadable" and "while generating the dataset" in hit.text
    ):
        inner = next((one for one in scan.timeline.failures if one.since <= hit.line != one.line < hit.line), None)
        if inner and inner.frames and inner.frames[-1].own and not _is_known(inner, hits):
            groups = {"words": inner.text[:200], "at": f", at {inner.frame}"}
            line = Line(inner.line, inner.text)
            found = combined_hit("dataset-unreadable", line, Tier.NAMED, groups, case="own-code")
            yield replace(found, speaker=inner.speaker)
            return


def _is_known(inner: Failure, hits: list[Hit]) -> bool:
    """Whether a rule knows the data set's own exception, and says more of it."""
    return any(hit.line == inner.line and hit.precise and hit.rule.id != "data-worker-failed" for hit in hits)


def _inner(later: list[Failure], outer: Failure, error: str) -> Failure | None:
    """The exception that a worker's traceback ends with."""
    for failure in later:
        named = failure.text.partition(":")[0].rpartition(".")[2] == error
        if named and failure.speaker == outer.speaker and failure.line - outer.line <= WORKER_LINES:
            return failure
    return None


def state_lost_under_zero(_: list[Hit], __: Facts, scan: Scan) -> Iterator[Hit]:
    """An optimizer that ZeRO steps asks for state which it had noted of the model's own parameters."""
    for failure in scan.timeline.failures:
        last = failure.frames[-1] if failure.frames else None
        if not last or not failure.text.startswith("KeyError: ") or not OWN_STATE.search(last.source):
            continue
        if any(ZERO.search(frame.path) for frame in failure.frames):
            key = failure.text.partition(": ")[2].strip("'\" ")[:60]
            line = Line(failure.line, failure.text)
            groups = {"key": key, "place": str(last)}
            yield replace(
                combined_hit("optimizer-state-key", line, Tier.NAMED, groups, case="model-parameters"),
                speaker=failure.speaker,
                speakers=_same(failure, scan),
            )
            return


ONLY_FAILED = re.compile(
    r"unhandled (?:system|cuda) error|ncclUnhandledCudaError|ncclInternalError|ncclSystemError|internal error"
)
NO_REASON = re.compile(
    r"NET/Plugin|Could not find|Cannot assign|MNNVL|NET/IB : Unable|Mismatched NCCL|comm 0x\w+ .{0,40}abort"
)
"""Of NCCL: that a call failed, without a reason; and warnings that are none."""


def nccl_says_why(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """A call of NCCL failed, and NCCL's own words before it, or behind "Last error:", say why, which no rule knows."""
    known = {hit.line for hit in hits}
    if any(hit.precise and "NCCL WARN" in hit.text for hit in hits):
        return
    for hit in hits:
        if hit.rule.id not in {"nccl-call-failed", "nccl-network-interface"} or not ONLY_FAILED.search(hit.text):
            continue
        behind = [one for one in scan.timeline.reasons if hit.line < one.number <= hit.line + NEAR_THE_CALL]
        warned = scan.first.get(Event.NCCL_WARNED)
        before = [warned] if warned and warned.number < hit.line else []
        for line in (*behind, *before):
            if line.number not in known and not NO_REASON.search(line.text):
                reason = line.text.partition("NCCL WARN ")[2] or line.text
                told = replace(hit, rule=RULES["nccl-call-failed"]).in_case("reason")
                named = replace(told.signature, tier=Tier.NAMED)
                values = {"reason": reason[:160]}
                yield replace(hit, signature=named, line=line.number, text=line.text, count=1, groups=values)
                return


NEAR_THE_CALL = 8  # so many lines below a failed call stands at most what NCCL says of it


def nodes_that_did_not_come_back(hits: list[Hit], facts: Facts, scan: Scan) -> Iterator[Hit]:
    """torchrun's rendezvous ran out, and the nodes had met before, or it waits for none but this one."""
    hit = next((hit for hit in hits if hit.rule.id == "rendezvous-incomplete" and hit.tier is Tier.GENERIC), None)
    if hit is None:
        return
    met = scan.timeline.step is not None or any(one.line < hit.line for one in scan.timeline.failures)
    met = met or any(one.line < hit.line for one in scan.timeline.exits) or scan.timeline.survived_exit > 0
    if met or _had_met(scan):
        yield hit.in_case("not-back")
    elif facts.nodes == "1":
        yield hit.in_case("alone")


def _had_met(scan: Scan) -> bool:
    """Whether a line says that ranks worked, ended, were lost or were started again."""
    return any(MET.search(raw[:4000]) or LOSS.search(raw[-400:]) for raw in scan.timeline.recent)


def _same(failure: Failure, scan: Scan) -> frozenset[Speaker]:
    """Who failed with the same words."""
    return frozenset(other.speaker for other in scan.timeline.failures if other.text == failure.text)


# Hits and lines of a start -> hits that need both: launchers started together, devices of another maker, a text for a number.
LAUNCHED = re.compile(
    rb"runner\.py:\d{1,5}:main\] cmd = .{0,2000}?deepspeed\.launcher\.launch .{0,4000}?--master_port=(\d{2,5})\b"
)

LAUNCH_ENDED = re.compile(rb"exits (?:successfully|with return code)|Traceback \(most recent")

INSTALLED_PACKAGE = re.compile(
    r"(?:site|dist)-packages[/\\](?P<package>[A-Za-z]\w{1,60})[/\\]|(?P<source>\bop_builder|deepspeed)[/\\]"
)

MAX_CALLS = 12  # of so many of the innermost calls the packages are named


def several_launchers(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """The port is taken, and deepspeed itself was started several times at once with it: each launcher wants to be the first."""
    taken = next((hit for hit in hits if hit.rule.id == "master-port-in-use"), None)
    if taken is None:
        return
    started = [(number, found[1]) for number, raw in enumerate(scan.timeline.recent) if (found := LAUNCHED.search(raw))]
    if len(started) < 2 or len({port for _, port in started}) > 1:
        return
    between = list(scan.timeline.recent)[started[0][0] : started[-1][0]]
    if any(LAUNCH_ENDED.search(raw) or STEP.search(raw[-400:]) or FINITE.search(raw[-400:]) for raw in between):
        return
    groups = {**taken.groups, "count": str(len(started)), "port": started[0][1].decode()}
    yield replace(taken.in_case("several-launchers"), groups=groups)


def devices_of_another_maker(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """The launcher counts no device, and the log has the tools of a maker whose devices torch does not see by itself."""
    hit = next((hit for hit in hits if "no GPU resources" in hit.text and hit.signature.title), None)
    if hit is None:
        return
    for maker in forms("facts")["maker"]:
        if any(re.search(maker["pattern"].encode(), raw[:4000]) for raw in scan.timeline.recent):
            steps = (maker["lister"], *(one for one in hit.signature.steps or () if "get_accelerator" in one))
            told = hit.in_case("another-maker")
            groups = {**hit.groups, "maker": maker["name"], "extension": maker["extension"]}
            yield replace(told, groups=groups, signature=replace(told.signature, steps=steps))
            return


def a_text_for_a_number(hits: list[Hit], _: Facts, __: Scan) -> Iterator[Hit]:
    """The two values that differ are written alike: one of them is a text in quotes."""
    for hit in hits:
        here, there = hit.groups.get("here", ""), hit.groups.get("there", "")
        if hit.rule.id == "hf-config-mismatch" and _are_equal(here, there):
            yield hit.in_case("types-differ")


def _are_equal(one: str, other: str) -> bool:
    """Whether two values are the same if types are left out.

    >>> _are_equal("8", "8"), _are_equal("true", "True"), _are_equal("1e-5", "1e-05"), _are_equal("8", "16")
    (True, True, True, False)
    """
    if not one or one.lower() == other.lower():
        return bool(one)
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def packages_that_do_not_fit(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """A package calls something with arguments that it does not take: the packages in whose code that was are named."""
    for hit in (one for one in hits if one.rule.id == "argument-not-known" and not one.signature.steps):
        failure = next((one for one in scan.timeline.failures if one.line == hit.line and one.frames), None)
        caller = _package(failure.frames[-1]) if failure else ""
        if failure is None or not caller:
            continue
        packages = list(dict.fromkeys(filter(None, map(_package, reversed(failure.frames[-MAX_CALLS:])))))
        groups = {
            **hit.groups,
            "caller": caller,
            "call": failure.frames[-1].place,
            "other": "".join(packages[1:2]),
            "others": " and ".join(packages[:3]),
        }
        yield replace(hit.in_case("several-packages" if packages[1:] else "one-package"), groups=groups)


def _package(frame: Frame) -> str:
    """The installed package that a frame is of; "" where it is none."""
    found = INSTALLED_PACKAGE.search(frame.path)
    return (found["package"] or "deepspeed") if found else ""


AUTODETECTED = "accelerator-autodetect-cpu"

GUESSED_HOMES = {"/usr", "/usr/local"}

DEFAULT_LIST = {"60", "61", "70"}

BUILD_COMMAND = re.compile(r"pip3? (?:install|wheel)|setup\.py|bdist_wheel|build_ext|DS_BUILD_\w+=1")


def wrong_home_behind_a_missing_part(hits: list[Hit], facts: Facts, _: Scan) -> Iterator[Hit]:
    """A header or library is missing because CUDA_HOME was guessed from a wrapper nvcc."""
    parts = {"cuda-header-missing", "cuda-lib-link-missing", "libc-headers-missing"}
    for hit in hits:
        if hit.rule.id in parts and facts.cuda_home in GUESSED_HOMES and hit.tier is Tier.FILE:
            missing = hit.groups.get("header") or hit.groups.get("library", "a part")
            line = Line(number=hit.line, text=hit.text)
            groups = {"home": facts.cuda_home or "", "missing": missing}
            yield combined_hit("cuda-home-wrong", line, Tier.FILE, groups, case="guessed")
            return


def default_list_refused(hits: list[Hit], facts: Facts, scan: Scan) -> Iterator[Hit]:
    """Nobody named architectures and no GPU was visible: DeepSpeed took 6.0;6.1;7.0, and CUDA 13's nvcc refuses them."""
    for hit in hits:
        refused = hit.groups.get("arch", "").rpartition("_")[2]
        if hit.rule.id != "gpu-arch-unsupported-by-nvcc" or refused not in DEFAULT_LIST or facts.arch_list:
            continue
        if "project" in hit.groups:  # another package, which has a list of its own
            continue
        if DEFAULT_LIST.issubset(facts.architectures) or Event.NO_GPU in scan.first:
            line = Line(number=hit.line, text=hit.text)
            yield combined_hit("gpu-arch-unsupported-by-nvcc", line, Tier.FILE, hit.groups, case="default-list")
            return


def ops_left_out(_: list[Hit], facts: Facts, scan: Scan) -> Iterator[Hit]:
    """What "Install Ops" has not: an op that was asked for by its variable is False, or not there at all, as DeepSpeed has none for
    the accelerator it chose; or every op is False, which is right for ops that are compiled at run time.
    """
    named = [op for op in facts.left_out if op in facts.asked]
    missing = [op for op in facts.asked if op not in {*facts.built, *facts.left_out, "ops", "not_implemented"}]
    if named:
        line = Line(number=scan.ops_line or 1, text=f"Install Ops: {', '.join(f'{op}: False' for op in named)}")
        yield combined_hit("op-silently-skipped", line, Tier.GENERIC, {"op": named[0]}, stands=True)
    if missing and (facts.built or facts.left_out):
        line, op = Line(number=scan.ops_line, text=f"Install Ops: no {', '.join(missing)}"), {"op": missing[0]}
        yield combined_hit("op-silently-skipped", line, Tier.GENERIC, op, case="no-such-op", stands=True)
    if facts.left_out and not facts.built and not named and "ops" not in facts.asked:
        line = Line(number=scan.ops_line, text="Install Ops: every op is False")
        yield combined_hit("op-silently-skipped", line, Tier.PROBE, case="nothing-built")


def built_for_another(hits: list[Hit], facts: Facts, scan: Scan) -> Iterator[Hit]:
    """fused_adam was built, and DeepSpeed had chosen the CPU for want of a visible GPU: it is the op's CPU flavour."""
    chose = next((hit for hit in hits if hit.rule.id == AUTODETECTED and hit.tier is Tier.PROBE), None)
    if chose is None or "fused_adam" not in facts.built or "+cpu" in (facts.torch or "") or not _went_well(scan):
        return
    line = Line(number=scan.ops_line, text="Install Ops: fused_adam is built")
    groups = {"op": "fused_adam"}
    if facts.cuda:
        yield combined_hit(AUTODETECTED, line, Tier.NAMED, groups, case="cpu-op-for-cuda", stands=True)
    else:
        told = combined_hit(AUTODETECTED, line, Tier.PROBE, groups, case="cpu-op", stands=True)
        yield replace(told, line=chose.line)


def _went_well(scan: Scan) -> bool:
    """Whether pip says that it installed, or nothing says that something failed."""
    installed = scan.last.get(Event.ENDED_WELL)
    failed = scan.last.get(Event.FAILED)
    trouble = max(failed.number if failed else 0, scan.last_exception)
    return not trouble or (installed is not None and installed.number > trouble)


def killed_while_compiling(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """SIGKILL while an op was being compiled: the compilers used up the memory."""
    began, loaded = scan.last.get(Event.COMPILING), scan.last.get(Event.LOADED)
    for hit in hits:
        if hit.rule.id != "host-ram-oom" or hit.tier is not Tier.GENERIC:
            continue
        compiling = began and began.number <= hit.line and (not loaded or loaded.number < began.number)
        if compiling or BUILD_COMMAND.search(hit.text):
            line = Line(number=hit.line, text=hit.text)
            yield combined_hit("compiler-oom-killed", line, Tier.NAMED, case="killed")
            return


def stopped_at_the_lock(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """torch's last line says that it opens its cache: there it waits for a lock that nobody holds."""
    waiting = scan.last.get(Event.WAITING)
    known = [hit for hit in hits if hit.tier <= Tier.GENERIC]
    if waiting and not known and not scan.exception and waiting.number >= scan.last_output:
        yield combined_hit("stale-jit-cache", waiting, Tier.GENERIC, case="log-stops")


def pre_compiled_on_windows(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """setup.py on Windows builds every op that is not switched off, and gives up at the first one that cannot be."""
    refused = [hit for hit in hits if hit.text.rstrip().endswith(f"Unable to pre-compile {hit.groups.get('op')}")]
    if refused and Event.WINDOWS in scan.first:
        line = Line(number=refused[0].line, text=refused[0].text)
        yield combined_hit("windows-unsupported-op", line, Tier.GENERIC, refused[0].groups, case="pre-compiled")


COMBINATIONS = (
    pre_compiled_on_windows,
    in_a_case,
    wrong_home_behind_a_missing_part,
    default_list_refused,
    ops_left_out,
    built_for_another,
    killed_while_compiling,
    stopped_at_the_lock,
    several_launchers,
    devices_of_another_maker,
    a_text_for_a_number,
    packages_that_do_not_fit,
    nodes_that_did_not_come_back,
    nccl_says_why,
    gpu_held_by_another,
    torch_without_the_gpu,
    warned_of_before,
    raised_by_the_data,
    raised_while_a_table_was_made,
    state_lost_under_zero,
)


def combined_hits(hits: list[Hit], facts: Facts, scan: Scan) -> list[Hit]:
    """The hits of all COMBINATIONS, each with the op it is about."""
    found = []
    for combination in COMBINATIONS:
        try:
            found += [replace(hit, op=hit.groups.get("op") or facts.op) for hit in combination(hits, facts, scan)]
        except Exception as error:  # the last resort: the others are looked for all the same
            scan.note_error(error)
    return found
