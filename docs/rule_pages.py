"""An mkdocs hook: a page for each rule at rules/ID/, the list of all, and the whole book for other programs at rules/rules.json.

Beside them the JSON schemas of ds_config.json for editors: schemas/ds_config-VERSION.json for each release, schemas/ds_config.json
for the newest.
"""

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

from dsdoctor.cli.explain import pages
from dsdoctor.config.releases import recorded, versions
from dsdoctor.config.schema import json_schema
from dsdoctor.core.release import ADDRESS
from dsdoctor.core.text import ManualPage
from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.rules.book import entries, rule_ids

MOST_SAMPLES = 6


def on_config(config: Any) -> Any:
    """The address of the pages is the one that a release is built with."""
    config.site_url = os.environ.get("DSDOCTOR_PAGES") or ADDRESS or None
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages."""
    files.append(File.generated(config, "rules/index.md", content="\n".join(_index())))
    for rule in rule_ids():
        files.append(File.generated(config, f"rules/{rule}.md", content="\n".join(_page(rule))))
    files.append(File.generated(config, "rules/rules.json", content=json.dumps(_book(), ensure_ascii=False, indent=1)))
    for version, schema in _schemas():
        name = f"schemas/ds_config{version}.json"
        files.append(File.generated(config, name, content=json.dumps(schema, separators=(",", ":"))))
    files.append(File.generated(config, "llms.txt", content="\n".join(_for_models(config.nav, files))))
    return files


def _for_models(nav: list[Any], files: Files) -> Iterator[str]:
    """The pages for a language model: https://llmstxt.org, in the order of the menu, each with its first sentence."""
    yield from (
        "# dsdoctor",
        "",
        "> Gets DeepSpeed built, and keeps it running: checks, diagnoses and watches trainings.",
        "",
    )
    for entry in nav:
        ((title, pages_of_it),) = entry.items()
        yield from (f"## {title}", "")
        for page in pages_of_it if isinstance(pages_of_it, list) else [entry]:
            ((name, path),) = page.items()
            file = files.get_file_from_path(path)
            text = _first_paragraph(file.content_string) if file else ""
            yield f"- [{name}]({file.url if file else path}): {re.split(r'(?<=[.?]) ', text)[0]}"
        yield ""


def _first_paragraph(text: str) -> str:
    paragraphs = (" ".join(each.split()) for each in text.split("\n\n"))
    return next((each for each in paragraphs if each and each[0] not in "#<|" and not each.startswith("```")), "")


def _schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema of each release that is known, and of the newest under a name that stays."""
    for version in versions():
        yield f"-{version}", json_schema(recorded(version))
    yield "", json_schema(recorded(versions()[0]))


def _book() -> dict[str, Any]:
    """Every rule as the book has it, with the room that makes its findings; the rules of logs with their patterns and samples."""
    rules = [{"room": room, **table} for rule in rule_ids() for room, table in entries(rule)]
    return {"schema": "dsdoctor-rules/1", "rules": rules}


def _index() -> Iterator[str]:
    yield from ("# Rules", "", "Every problem that dsdoctor names, by the id in brackets behind a finding.", "")
    for rule in rule_ids():
        _, page = next(pages(rule))
        first = page.means.partition("\n\n")[0].replace("\n", " ")
        yield f"- [`{rule}`]({rule}.md): {_inline(first)}"


def _page(rule: str) -> Iterator[str]:
    yield from (f"# {rule}", "")
    for where, page in pages(rule):
        if where:
            yield from (f"*{where}*", "")
        yield from _parts(page)
    yield from _said(rule)
    yield from ("", f"In a terminal: `dsdoctor explain {rule}`. All of them: [rules](index.md).", "")


def _parts(page: ManualPage) -> Iterator[str]:
    for heading, text in (("What it means", page.means), ("Why it matters", page.why), ("How to fix it", page.fix)):
        if text:
            yield from (f"## {heading}", "", *_blocks(text), "")
    yield from (f"Since dsdoctor {page.since}.", "")


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs, with what is indented as code."""
    for paragraph in text.split("\n\n"):
        code = all(line.startswith("    ") for line in paragraph.splitlines() if line.strip())
        if code:
            yield from ("", "```console", *(line[4:] for line in paragraph.splitlines()), "```", "")
        else:
            yield from (_inline(paragraph[:1].upper() + paragraph[1:]), "")


def _said(rule: str) -> Iterator[str]:
    """What tools print of it, so that a search for the error's own words leads here."""
    log_rule = RULES.get(rule)
    if log_rule is None:
        return
    yield from ("## What tools print", "")
    for signature in log_rule.signatures[:MOST_SAMPLES]:
        yield from ("```text", *(line.replace("```", "'''") for line in signature.sample.splitlines()), "```", "")


def _inline(text: str) -> str:
    """Text that Markdown and HTML leave as it is."""
    for sign in ("\\", "`", "*", "_", "<", ">", "[", "]", "|", "#"):
        text = text.replace(sign, f"\\{sign}" if sign not in "<>" else {"<": "&lt;", ">": "&gt;"}[sign])
    return text
