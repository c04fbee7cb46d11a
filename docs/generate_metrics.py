"""Writes the table of metrics in `docs/operate.md`: `python docs/generate_metrics.py`. A test compares."""

from pathlib import Path

from megamcp.measures import COUNTED, IN_DATABASE, STANDING

PAGE = Path(__file__).parent / "operate.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->\n"


def page(old: str) -> str:
    """The text that `operate.md` must have, with what it says besides."""
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = ["| metric | type | labels | meaning |\n", "| --- | --- | --- | --- |\n"]
    for table in (COUNTED, STANDING, IN_DATABASE):
        for name, (labels, told) in table.items():
            kind = "histogram" if name.endswith("_seconds") else "counter" if name.endswith("_total") else "gauge"
            rows.append(f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {told} |\n")
    return before + BEGIN + "".join(rows) + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
