"""Google-style docstrings: the tool's description and its parameters' descriptions.

The description is all text before the first of `Args:`, `Returns:`, `Raises:` and `Yields:`. Other sections
are part of the description. Nothing is checked here.
"""

import re
from dataclasses import dataclass, field

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields?):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(slots=True)
class Docstring:
    description: str = ""
    arguments: dict[str, str] = field(default_factory=dict)


def parse_docstring(text: str) -> Docstring:
    """`text` without its indentation, as `inspect.getdoc` gives it."""
    section = ""
    description: list[str] = []
    arguments: list[str] = []
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section = heading.group(1)
        elif not section:
            description.append(line)
        elif line.strip() and not line[0].isspace():
            section = "other"  # text that is not indented ends a section
        elif section in ("Args", "Arguments", "Parameters"):
            arguments.append(line)
    return Docstring("\n".join(description).strip(), _arguments(arguments))


def _arguments(lines: list[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    current: list[str] = []
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    for line in lines:
        entry = _ARGUMENT.match(line[margin:])
        if entry:
            current = found.setdefault(entry.group(1), [entry.group(2)])
        elif line.strip():
            current.append(line.strip())
    return {name: " ".join(part for part in parts if part) for name, parts in found.items()}
