"""Hits of a log -> hits that need several lines: a wrong CUDA_HOME behind a missing header, an op left out, a wait for a lock."""

import re
from collections.abc import Iterator
from dataclasses import replace

from dsdoctor.diagnosis.combined_runs import RUN_COMBINATIONS, combined_hit
from dsdoctor.diagnosis.failures import Frame, refusal_of
from dsdoctor.diagnosis.marks import Event
from dsdoctor.diagnosis.models import Facts, Hit, Line, Tier
from dsdoctor.diagnosis.progress import FINITE, STEP
from dsdoctor.diagnosis.scan import Scan

# Hits and lines of a start -> hits that need both: launchers started together, devices of another maker, a text for a number.


LAUNCHED = re.compile(
    rb"runner\.py:\d{1,5}:main\] cmd = .{0,2000}?deepspeed\.launcher\.launch .{0,4000}?--master_port=(\d{2,5})\b"
)
ENDED = re.compile(rb"exits (?:successfully|with return code)|Traceback \(most recent")
MAKERS: tuple[tuple[re.Pattern[bytes], str, str, str], ...] = (
    (
        re.compile(
            rb"initializing oneAPI environment|oneapi/setvars\.sh|intel_extension_for_(?:pytorch|deepspeed)|xpu-smi"
        ),
        "Intel's oneAPI",
        "intel_extension_for_pytorch (for old releases intel_extension_for_deepspeed too)",
        "sycl-ls",
    ),
    (
        re.compile(rb"torch_npu|npu-smi|ascend-toolkit|Ascend/\S{0,80}set_env\.sh"),
        "Ascend's CANN",
        "torch_npu",
        "npu-smi info",
    ),
    (re.compile(rb"habana|hl-smi|HABANA_"), "Habana's Gaudi", "habana_frameworks", "hl-smi"),
    (re.compile(rb"torch_mlu|cnmon\b|[Cc]ambricon"), "Cambricon's MLU", "torch_mlu", "cnmon"),
    (
        re.compile(rb"rocm-smi|/opt/rocm|HIP_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES"),
        "AMD's ROCm",
        "a torch for ROCm",
        "rocm-smi",
    ),
)
"""What a log has of another maker's machine: how it is called here, what makes torch see its devices, what lists them."""

INSTALLED = re.compile(
    r"(?:site|dist)-packages[/\\](?P<package>[A-Za-z]\w{1,60})[/\\]|(?P<source>\bop_builder|deepspeed)[/\\]"
)
DEEPCOMPILE = re.compile(
    rb"deepcompile=True|[/\\\\]deepspeed[/\\\\]compile[/\\\\]|Launching compile passes: |MemoryProfiling error"
)
SYMBOLIC = re.compile(rb"concrete integers|SymInt|[Ss]ymbolic (?:size|shape)|data-dependent|[Uu]nbacked")
CALLS = 12
"""Of so many of the innermost calls the packages are named."""


def several_launchers(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """The port is taken, and deepspeed itself was started several times at once with it: each launcher wants to be the first."""
    taken = next((hit for hit in hits if hit.rule.id == "master-port-in-use"), None)
    if taken is None:
        return
    started = [(number, found[1]) for number, raw in enumerate(scan.timeline.recent) if (found := LAUNCHED.search(raw))]
    if len(started) < 2 or len({port for _, port in started}) > 1:
        return
    between = list(scan.timeline.recent)[started[0][0] : started[-1][0]]
    if any(ENDED.search(raw) or STEP.search(raw[-400:]) or FINITE.search(raw[-400:]) for raw in between):
        return
    groups = {**taken.groups, "count": str(len(started)), "port": started[0][1].decode()}
    yield replace(taken.in_case("several-launchers"), groups=groups)


def devices_of_another_maker(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """The launcher counts no device, and the log has the tools of a maker whose devices torch does not see by itself."""
    hit = next((hit for hit in hits if "no GPU resources" in hit.text and hit.signature.title), None)
    if hit is None:
        return
    for pattern, maker, extension, lister in MAKERS:
        if any(pattern.search(raw[:4000]) for raw in scan.timeline.recent):
            steps = (lister, *(one for one in hit.signature.steps or () if "get_accelerator" in one))
            told = hit.in_case("another-maker")
            groups = {**hit.groups, "maker": maker, "extension": extension}
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
        packages = list(dict.fromkeys(filter(None, map(_package, reversed(failure.frames[-CALLS:])))))
        groups = {
            **hit.groups,
            "caller": caller,
            "call": failure.frames[-1].place,
            "other": "".join(packages[1:2]),
            "others": " and ".join(packages[:3]),
        }
        yield replace(hit.in_case("several-packages" if packages[1:] else "one-package"), groups=groups)


def compiled_by_deepspeed(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """torch.compile failed, and it was DeepCompile, DeepSpeed's own back end, that compiled."""
    hit = next((hit for hit in hits if hit.rule.id == "torch-compile-failed" and "what" in hit.groups), None)
    if hit is None or not any(DEEPCOMPILE.search(raw[:4000]) for raw in scan.timeline.recent):
        return
    symbolic = any(SYMBOLIC.search(raw[:4000]) for raw in scan.timeline.recent)
    yield hit.in_case("deepcompile-symbolic" if symbolic else "deepcompile")


def _package(frame: Frame) -> str:
    """The installed package that a frame is of; "" where it is none."""
    found = INSTALLED.search(frame.path)
    return (found["package"] or "deepspeed") if found else ""


LAUNCH_COMBINATIONS = (
    several_launchers,
    devices_of_another_maker,
    a_text_for_a_number,
    packages_that_do_not_fit,
    compiled_by_deepspeed,
)


AUTODETECTED = "accelerator-autodetect-cpu"
GUESSED_HOMES = {"/usr", "/usr/local"}
DEFAULT_LIST = {"60", "61", "70"}
ARGUMENT_CHECKS = re.compile(
    r"transformers[/\\](?:training_args\w{0,20}|hf_argparser)\.py:|transformers[/\\]trainer\.py:(?:__init__|_validate_\w{1,40})$"
    r"|accelerate[/\\](?:utils[/\\](?:dataclasses|deepspeed|launch)|commands[/\\](?:launch|config)(?:[/\\]\w{1,20}|\w{0,20}))\.py:"
    r"|accelerate[/\\]accelerator\.py:__init__$|(?:llamafactory|llmtuner)[/\\]hparams[/\\]"
    r"|swift[/\\](?:\w{1,20}[/\\])?arguments?[/\\]|axolotl[/\\]utils[/\\](?:config|schemas)|trl[/\\]trainer[/\\]\w{1,40}_config\.py:"
    r"|trl[/\\](?:experimental[/\\]\w{1,30}|trainer)[/\\]\w{1,40}_trainer\.py:__init__$|peft[/\\](?:tuners[/\\]\w{1,30}[/\\])?config\.py:"
    r"|verl[/\\](?:utils|workers)[/\\]config[/\\.]|(?:accelerator_connector|strategies[/\\]deepspeed)\.py:"
    r"|deepspeed[/\\](?:runtime[/\\]config\w{0,20}|elasticity[/\\]\w{1,30}|inference[/\\]config)\.py:"
    r"|openrlhf[/\\]cli[/\\]|torch[/\\]distributed[/\\]run\.py:"
)
"""Places in which a framework looks at its arguments, before it does anything with them."""

REFUSALS = re.compile(
    r"(?:\w{1,40}\.)*(?:Value|Assertion|NotImplemented|DeepSpeedConfig|ElasticityConfig|Elasticity)Error: "
)
SENTENCE = re.compile(
    r"(?:\w{1,40}\.)*(?:Value|NotImplemented|Import|Type|Assertion|OS|Environment)Error: "
    r"(?=.{25})[\"'`(\[]{0,3}[A-Za-z`][^ ]{0,60}(?: [^ ]{1,80}){4}"
)
"""An exception by which libraries refuse something, with a sentence of five words and more."""

A_SYMPTOM = re.compile(
    r"CUDA error|NCCL|INTERNAL ASSERT|report a bug|shape|size mismatch|sizes of tensors|dtype|out of memory|CUDA out|Triton|driver"
    r"|checkpoint|state_dict|token|connection|timed out|symbol|undefined|compile|nvcc|PyTorch version|found version"
    r"|[Pp]ermission|argument after|unexpected keyword|positional argument|file or directory"
    r"|mismatch|[Uu]nexpected(?:ly)? |[Ii]nternal|[Bb]ug\b"
)
"""Words of faults whose sentence does not name their reason."""
CHECK_THEMSELVES = {"DeepSpeed", "torch"}
"""Packages whose assertions are about their own state more often than about what they were given."""

NEW_SETUPTOOLS = re.compile(rb"\bsetuptools(?:-|==| {1,20})((?:8[2-9]|9\d|[1-9]\d\d)\.\d{1,3}(?:\.\d{1,3})?)\b")
"""A setuptools without pkg_resources, as pip and conda name it."""

SHORT_MESSAGE = 12
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


def asked_and_left_out(_: list[Hit], facts: Facts, scan: Scan) -> Iterator[Hit]:
    """An op that was asked for by its variable is False in "Install Ops"."""
    named = [op for op in facts.left_out if op in facts.asked]
    if named:
        line = Line(number=scan.ops_line or 1, text=f"Install Ops: {', '.join(f'{op}: False' for op in named)}")
        yield combined_hit("op-silently-skipped", line, Tier.GENERIC, {"op": named[0]}, stands=True)


def asked_and_unknown(_: list[Hit], facts: Facts, scan: Scan) -> Iterator[Hit]:
    """An op that was asked for by its variable is not in "Install Ops" at all: DeepSpeed has none for the accelerator it chose."""
    listed = {*facts.built, *facts.left_out, "ops", "not_implemented"}
    missing = [op for op in facts.asked if op not in listed]
    if missing and (facts.built or facts.left_out):
        line = Line(number=scan.ops_line, text=f"Install Ops: no {', '.join(missing)}")
        yield combined_hit(
            "op-silently-skipped", line, Tier.GENERIC, {"op": missing[0]}, case="no-such-op", stands=True
        )


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


def nothing_was_built(_: list[Hit], facts: Facts, scan: Scan) -> Iterator[Hit]:
    """Every op is False: right for ops compiled at run time, wrong where an op was asked for."""
    if facts.left_out and not facts.built and not set(facts.asked) & {*facts.left_out, "ops"}:
        line = Line(number=scan.ops_line, text="Install Ops: every op is False")
        yield combined_hit("op-silently-skipped", line, Tier.PROBE, case="nothing-built")


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


def torch_missing_on_windows(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """setup.py cannot import torch on Windows, where our own builds do not run and every op is asked for."""
    missing = [hit for hit in hits if hit.rule.id == "torch-missing-at-build" and not hit.signature.steps]
    for hit in missing if Event.WINDOWS in scan.first else []:
        if hit.project in {None, "", "deepspeed"}:
            yield hit.in_case("windows")


def setuptools_without_a_part(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """pkg_resources is missing, and the log says that a setuptools is installed that has none any more."""
    hit = next((hit for hit in hits if hit.groups.get("module") == "pkg_resources"), None)
    found = next((found for raw in scan.timeline.recent if (found := NEW_SETUPTOOLS.search(raw[-4000:]))), None)
    if hit and found:
        groups = {**hit.groups, "setuptools": found[1].decode()}
        yield replace(hit.in_case("new-setuptools"), groups=groups)


def refused_arguments(_: list[Hit], __: Facts, scan: Scan) -> Iterator[Hit]:
    """A framework's own check of its arguments raised on purpose: the last frame is that check, and its words say what clashes."""
    for failure in scan.timeline.failures:
        last = failure.frames[-1] if failure.own and failure.frames else None
        if last and last.source.startswith("raise ") and ARGUMENT_CHECKS.search(f"{last.path}:{last.function}"):
            message = failure.text.partition(": ")[2].strip()
            if REFUSALS.match(failure.text) and len(message) > SHORT_MESSAGE:
                line = Line(number=failure.line, text=failure.text)
                yield combined_hit("arguments-refused", line, Tier.GENERIC, {"message": message[:160]})
                return


def refused_in_a_sentence(hits: list[Hit], _: Facts, scan: Scan) -> Iterator[Hit]:
    """The first process that failed was stopped by a library on purpose, with a whole sentence, and no rule knows it."""
    own = [failure for failure in scan.timeline.failures if failure.own]
    failure = min(own, key=lambda one: one.line, default=None)
    refusal = refusal_of(failure)
    if failure is None or refusal is None or not SENTENCE.match(failure.text) or A_SYMPTOM.search(failure.text):
        return
    if refusal.condition and refusal.package in CHECK_THEMSELVES:
        return
    if any(failure.since <= hit.line <= failure.line + SHORT_MESSAGE and not hit.aside for hit in hits):
        return
    message = failure.text.partition(": ")[2].strip()[:220]
    line = Line(number=failure.line, text=failure.text)
    groups = {"package": refusal.package, "place": refusal.place, "message": message}
    yield combined_hit("library-asks-for", line, Tier.GENERIC, groups, case="sentence")


COMBINATIONS = (
    refused_arguments,
    refused_in_a_sentence,
    pre_compiled_on_windows,
    torch_missing_on_windows,
    setuptools_without_a_part,
    wrong_home_behind_a_missing_part,
    default_list_refused,
    asked_and_left_out,
    asked_and_unknown,
    built_for_another,
    nothing_was_built,
    killed_while_compiling,
    stopped_at_the_lock,
    *LAUNCH_COMBINATIONS,
    *RUN_COMBINATIONS,
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
