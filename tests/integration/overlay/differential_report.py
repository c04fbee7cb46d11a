"""What a search did, in numbers: nothing is left out of it silently."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.integration.overlay.differential_census import SCHEMA, STATEMENTS
from tests.integration.overlay.differential_openness import Allowed


@dataclass(slots=True)
class Report:
    schemas: int = 0
    tables: int = 0
    programs: int = 0
    statements: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    """Failed on both sides with the same error."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refused by the overlay's statement check, so run on neither side."""
    reasons: Counter[str] = field(default_factory=Counter)
    """What the check said of those."""
    together: Counter[str] = field(default_factory=Counter)
    """Schemas that were refused for constructs that are taken alone."""
    allowed: Counter[Allowed] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    """Constructs of the census: in schemas that were loaded, in statements that took effect."""
    not_taken: Mapping[str, str] = field(default_factory=dict)

    def _least(self) -> list[tuple[int, str]]:
        return sorted((self.done[name], name) for name in (*SCHEMA, *STATEMENTS))[:12]

    def text(self) -> str:
        total = sum(self.statements.values())
        lines = [
            f"{self.programs} programs over {self.schemas} schemas ({self.tables} tables), {total} statements",
            "steps: " + ", ".join(f"{n} {name}" for name, n in sorted(self.steps.items())),
            "statements (of which failed alike / refused): "
            + ", ".join(
                f"{name} {self.statements[name]} ({self.failed[name]}/{self.refused[name]})"
                for name in sorted(self.statements | self.refused)
            ),
            "errors alike: " + ", ".join(f"{code} {n}" for code, n in self.codes.most_common()),
            "constructs least drawn: " + ", ".join(f"{name} {n}" for n, name in self._least()),
            *(f"{n} schemas refused: {reason}" for reason, n in self.together.most_common()),
            *(f"refused {n} times: {reason}" for reason, n in self.reasons.most_common()),
            *(f"allowed {n} times: {why.name} ({why.value})" for why, n in self.allowed.most_common()),
            *(f"not taken: {name}: {reason[:160]}" for name, reason in sorted(self.not_taken.items())),
        ]
        return "\n".join(lines)
