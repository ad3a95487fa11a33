"""A finding that follows from several lines -> a hit of its rule, as if one line had said it."""

from dsdoctor.diagnosis.catalogue.rules import RULES
from dsdoctor.diagnosis.models import Hit, Line, Signature, Tier


def combined_hit(
    rule: str, line: Line, title: str, tier: Tier, groups: dict[str, str] | None = None, *, stands: bool = False
) -> Hit:
    """A hit that follows from several lines; ``stands``: it is true of the result, however well the log ended."""
    signature = Signature(words="", pattern="", sample="", tier=tier, title=title, stands=stands)
    return Hit(rule=RULES[rule], signature=signature, line=line.number, text=line.text, groups=groups or {})
