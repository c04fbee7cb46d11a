"""SQL files of this package, cut into named texts (`-- name: x` above each)."""

import re
from importlib.resources import files


def text(name: str) -> str:
    """A whole file of `sql/`."""
    return files("megamcp.state").joinpath("sql", name).read_text(encoding="utf-8")


def named(name: str) -> dict[str, str]:
    """The texts of one file by their names; what stands above the first is a comment on the file."""
    parts = re.split(r"^-- name: (\w+)$", text(name), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
