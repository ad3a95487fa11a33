"""Every rule of the catalogue by its id; `dsdoctor explain RULE` prints the manual page."""

from dsdoctor.diagnosis import arch, compiler, headers, install, jit, launch, link, load, packages, run, toolkit
from dsdoctor.diagnosis.nouns import Rule

ROOMS = (install, packages, toolkit, arch, compiler, headers, link, load, jit, launch, run)

RULES: dict[str, Rule] = {rule.id: rule for room in ROOMS for rule in room.RULES}
