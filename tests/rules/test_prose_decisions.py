"""No code of the package looks into a finding's words to decide: a field, a rule's id, a case or a relation says it."""

import ast

import pytest

from tests.rules.prose_decisions import decisions
from tests.source import PACKAGE, nodes


@pytest.mark.slow
def test_no_code_looks_into_a_finding_s_words_to_decide() -> None:
    assert [str(path.relative_to(PACKAGE)) for path, seen in nodes().items() for _ in decisions(seen)] == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("'harmless' in finding.title", 1),
        ("first.title not in verdict", 1),
        ("found.title.removeprefix('rank 0: ')", 1),
        ("re.search('rank', finding.title)", 1),
        ("finding.fix.text.startswith('use')", 1),
        ("fix.text.partition(': ')", 1),
        ("any('lock' in line for line in finding.evidence)", 1),
        ("'a line' in finding.evidence", 1),
        ("failure.text.startswith('KeyError')", 0),
        ("f'{where}: {finding.title}'", 0),
        ("(finding.rule, finding.title) in shown", 0),
        ("replace(finding, title=finding.title.replace(WHO, who))", 0),
    ],
)
def test_a_look_is_seen(code: str, count: int) -> None:
    assert len(list(decisions([*ast.walk(ast.parse(code))]))) == count
