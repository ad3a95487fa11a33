"""Hits and failures of a run -> hits that need several lines: who holds the GPU, what a data set or a kernel itself said."""

import re
from collections.abc import Iterator
from dataclasses import replace

from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.diagnosis.facts import OtherProcesses, held_by_others
from dsdoctor.diagnosis.failures import Failure
from dsdoctor.diagnosis.lines import Speaker
from dsdoctor.diagnosis.models import Facts, Hit, Line, Signature, Tier
from dsdoctor.diagnosis.relations import Story, trained_after
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.timeline import LOSS

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


# A GPU that is full because of other processes -> a hit that names them, with what they hold.


OF_THIS_JOB = rb"(?:subprocess|pid[=: ]{1,3}|PID[=: ]{1,3}|Process|process) {0,2}%s\b(?! has )"
"""How launchers name the processes that they start."""


def gpu_held_by_another(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """The GPU is full because other processes are on it: neither fragmentation nor this process alone."""
    for hit in hits:
        others = held_by_others(hit.text) if hit.rule.id == "gpu-oom" else None
        if others:
            found = combined_hit("gpu-oom", Line(hit.line, hit.text), Tier.NAMED, case=_case(others))
            signature = replace(found.signature, sample=hit.signature.sample)
            yield replace(hit, signature=signature, groups=_groups(others, scan))
            return


def _case(others: OtherProcesses) -> str:
    if others.among_them:
        return "one-of-several"
    return "other-processes" if len(others.pids) > 1 else "another-process"


def _groups(others: OtherProcesses, scan: Scan) -> dict[str, str]:
    """What is known of the other processes."""
    return {
        "held": f"{others.held:.2f}",
        "own": f"{others.own:.2f}",
        "pids": f"process{'es' if len(others.pids) > 1 else ''} {', '.join(others.pids[:6])}",
        "whose": ", of this same run" if _is_of_this_run(others.pids, scan) else "",
        "pid": others.pids[0],
    }


def _is_of_this_run(pids: tuple[str, ...], scan: Scan) -> bool:
    """Whether the run's own launcher names the processes: two of its ranks are on one GPU."""
    known = {str(one.pid) for one in scan.timeline.exits if one.pid}
    named = [raw[-600:] for raw in scan.timeline.recent]
    return all(
        pid in known or any(re.search(OF_THIS_JOB % pid.encode(), raw) for raw in named if pid.encode() in raw)
        for pid in pids
    )


KERNEL_CHECK = re.compile(r"\.(?:cu|hip|cuh):\d{1,6}: .{0,200}?Assertion [`'\"](?P<words>.{1,160}?)[`'\"]? failed")
CAUGHT = re.compile(r"Caught (?P<error>\w{1,60}) in DataLoader worker process \d")
WORKER_LINES = 100
"""Over how many lines the traceback of a worker may go on."""

NAN_METRIC = re.compile(
    rb"\b(?P<name>(?:\w{1,30}[/_])?loss(?:[/_]\w{1,30})?)['\"]?\s{0,3}[:=]\s{0,3}-?nan\b", re.IGNORECASE
)
"""A loss that is nan, whatever it is called.

``'loss/policy_avg': nan``, ``lm_loss = nan``.
"""

WRITING = re.compile(
    r"PytorchStreamWriter failed|\b(?:_?save_checkpoint|save_pretrained|save_model|torch\.save|save_file)\b"
)

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


def words_of_a_kernel(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """A kernel on the GPU stopped, and its own line says what it had checked."""
    stopped = next((hit for hit in hits if hit.rule.id == "gpu-assert"), None)
    for failure in scan.timeline.failures:
        found = KERNEL_CHECK.search(failure.text) if stopped and failure.native else None
        if stopped and found:
            groups = {"words": found["words"]}
            told = combined_hit("gpu-assert", Line(failure.line, failure.text), Tier.GENERIC, case="its-check")
            yield replace(stopped, signature=replace(told.signature, sample=stopped.signature.sample), groups=groups)
            return


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


def nan_before_sampling(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """Tokens cannot be drawn from nan, and the losses had been nan before."""
    drawn = next((hit for hit in hits if hit.rule.id == "sampling-from-nan"), None)
    losses = [found for raw in scan.timeline.recent if (found := NAN_METRIC.search(raw))] if drawn else []
    if drawn and losses:
        yield replace(drawn.in_case("nan-loss"), groups={"loss": losses[0]["name"].decode()})


def full_while_saving(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """The disk is full, and what a process was doing is to save a checkpoint: its folder is not whole."""
    full = next((hit for hit in hits if hit.rule.id == "disk-full"), None)
    if full and any(WRITING.search(f"{failure.text} {_calls(failure)}") for failure in scan.timeline.failures):
        yield full.in_case("while-saving")


def _calls(failure: Failure) -> str:
    """The functions that a process was in."""
    return " ".join(f"{frame.function} {frame.source}" for frame in failure.frames)


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


RUN_COMBINATIONS = (
    nodes_that_did_not_come_back,
    full_while_saving,
    gpu_held_by_another,
    torch_without_the_gpu,
    warned_of_before,
    words_of_a_kernel,
    raised_by_the_data,
    raised_while_a_table_was_made,
    nan_before_sampling,
    state_lost_under_zero,
)
