"""What the house promises about the code: who may import whom, how long files get, what is listed where.

Read from the source, never by running it; only the public surfaces are imported.
"""

import ast
import functools
import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamcp import errors
from megamcp.hints import HINTS
from megamcp.settings import Settings

ROOT = Path(__file__).parents[2]
ROOMS = ("megamcp", "tool_servers", "benchmarks", "weft_trainer", "sandboxes")
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "manager", "base", "common", "misc"}


def sources(*rooms: str) -> list[Path]:
    """Python files of the rooms; virtual environments inside them are others' code."""
    found = (path for room in rooms for path in (ROOT / room).rglob("*.py"))
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(ROOT).parts))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names of what a file imports anywhere, functions and `TYPE_CHECKING` included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


# (files, what of ours they may import, what of others they may not)
DIRECTIONS: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("weft_trainer", ("weft_trainer", "megamcp.client"), ("asyncpg", "sqlalchemy", "fastapi", "mcp")),
    ("tool_servers", ("tool_servers", "megamcp.sdk"), ("asyncpg", "fastapi", "mcp")),
    (
        "megamcp/client",
        ("megamcp.client", "megamcp.errors", "megamcp.types", "megamcp.__version__"),
        ("mcp", "fastapi", "starlette", "asyncpg", "sqlalchemy", "aiohttp", "uvicorn"),
    ),
    (
        "megamcp/dataplane",
        ("megamcp.dataplane", "megamcp.errors", "megamcp.__version__"),
        ("asyncpg", "sqlalchemy", "fastapi", "starlette", "mcp", "httpx"),
    ),
    (
        "megamcp/sdk",
        (
            "megamcp.sdk",
            "megamcp.documents.content",
            "megamcp.documents.table",
            "megamcp.errors",
            "megamcp.outages",
            "megamcp.plain",
            "megamcp.state.rewrites",
            "megamcp.state.statements",
            "megamcp.__version__",
        ),
        ("fastapi", "starlette", "mcp", "aiohttp", "httpx"),
    ),
    (
        "megamcp/loading",
        ("megamcp.loading", "megamcp.errors", "megamcp.outages", "megamcp.postgres.layout"),
        ("sqlalchemy", "fastapi", "starlette", "mcp", "aiohttp"),
    ),
    (
        "megamcp/state",
        ("megamcp.state", "megamcp.loading", "megamcp.errors", "megamcp.failpoints", "megamcp.outages"),
        ("sqlalchemy", "fastapi", "starlette", "mcp", "aiohttp"),
    ),
    (
        "megamcp/postgres",
        ("megamcp.postgres", "megamcp.errors", "megamcp.outages"),
        ("sqlalchemy", "fastapi", "mcp", "aiohttp"),
    ),
    (
        "megamcp/relay",
        ("megamcp.relay", "megamcp.errors", "megamcp.state.names"),
        ("asyncpg", "sqlalchemy", "fastapi", "starlette", "mcp", "aiohttp", "httpx"),
    ),
    (
        "megamcp/oauth",
        (
            "megamcp.oauth",
            "megamcp.dataplane.http",
            "megamcp.definitions",
            "megamcp.environments",
            "megamcp.errors",
            "megamcp.references",
            "megamcp.settings",
            "megamcp.store",
        ),
        ("sqlalchemy", "mcp", "aiohttp", "httpx"),
    ),
    ("sandboxes", ("sandboxes",), ("asyncpg", "sqlalchemy", "fastapi", "starlette", "mcp", "pydantic", "httpx")),
    ("sandboxes/confine", ("sandboxes.confine",), ("msgspec",)),
    ("sandboxes/forkserver/driver.py", ("sandboxes.confine", "sandboxes.forkserver"), ("msgspec",)),
    ("megamcp/errors.py", ("megamcp.hints",), ("pydantic", "asyncpg", "fastapi")),
    ("megamcp/types.py", (), ("asyncpg", "fastapi", "sqlalchemy")),
    ("megamcp/settings.py", (), ("asyncpg", "fastapi", "sqlalchemy")),
]


@pytest.mark.parametrize(("room", "ours", "not_theirs"), DIRECTIONS, ids=[room for room, _, _ in DIRECTIONS])
def test_imports_go_one_way(room: str, ours: tuple[str, ...], not_theirs: tuple[str, ...]) -> None:
    for path in [ROOT / room] if room.endswith(".py") else sources(room):
        for name in imports(path):
            if within(name, *ROOMS):
                assert within(name, *ours), f"{path.relative_to(ROOT)} imports {name}"
            assert not within(name, *not_theirs), f"{path.relative_to(ROOT)} imports {name}"


def test_nothing_of_the_product_imports_tests_or_benchmarks_or_the_trainer() -> None:
    for path in sources("megamcp", "tool_servers"):
        for name in imports(path):
            assert not within(name, "tests", "benchmarks", "weft_trainer"), f"{path.relative_to(ROOT)} imports {name}"


def test_the_gateway_reaches_sandboxes_by_their_client_alone() -> None:
    allowed = ("sandboxes.client", "sandboxes.types", "sandboxes.files")
    for path in sources("megamcp"):
        for name in imports(path):
            assert not within(name, "sandboxes") or within(name, *allowed), f"{path.relative_to(ROOT)} imports {name}"


def test_fixtures_are_imported_by_tests_only() -> None:
    """`testing.py` needs pytest, which a user hasn't installed."""
    for path in sources("megamcp", "tool_servers"):
        if path.name != "testing.py":
            assert not [name for name in imports(path) if within(name, "pytest", "pytest_asyncio", "megamcp.testing")]


@pytest.mark.parametrize("path", sources(*ROOMS, "migrations"), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 500, f"{path.name} has {text.count(chr(10))} lines"
    assert path.stem not in FORBIDDEN_NAMES
    tree = ast.parse(text)
    assert not tree.body or ast.get_docstring(tree), f"{path.relative_to(ROOT)} has no docstring"


def test_tests_read_as_claims() -> None:
    for path in sources("tests"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                assert node.name.count("_") >= 2, f"{path.relative_to(ROOT)}: {node.name}"


@pytest.mark.parametrize(
    "name",
    [
        "megamcp.client",
        "megamcp.sdk",
        "megamcp.dataplane",
        "megamcp.state",
        "megamcp.postgres",
        "megamcp.relay",
        "megamcp.testing",
    ],
)
def test_all_is_exactly_the_public_surface(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    offered = {key: getattr(module, key) for key in module.__all__}  # each one exists, lazy ones too
    assert all(value is not None for value in offered.values())
    if name == "megamcp.testing":
        return  # one file: what it imports for itself is not offered
    imported = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and not inspect.ismodule(value) and key not in ("Any", "TYPE_CHECKING")
    }
    assert imported <= set(module.__all__), "imported in __init__ and not offered"


def test_the_page_of_metrics_is_made_from_what_is_measured() -> None:
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    generated = runpy.run_path(str(ROOT / "docs" / "generate_metrics.py"))["page"](page)
    assert page == generated, "run: python docs/generate_metrics.py"


def test_every_setting_is_documented_as_it_is() -> None:
    generated = runpy.run_path(str(ROOT / "docs" / "generate_settings.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == generated, (
        "run: python docs/generate_settings.py"
    )
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name
        assert f"`MEGAMCP_{name.upper()}`" in generated


def test_the_support_table_is_what_the_tests_say() -> None:
    generated = runpy.run_path(str(ROOT / "docs" / "generate_support.py"))["page"]()
    assert (ROOT / "docs" / "support.md").read_text(encoding="utf-8") == generated, (
        "run: python docs/generate_support.py"
    )


# -- error codes --------------------------------------------------------------------------------------------------

RESULT_MAKERS = {"failure", "CallRefused"}
VARIABLE = {"rollout_": {"rollout_closed", "rollout_expired"}}
"""Codes that are put together from a status."""
LOCAL = {"code"}  # the keys of `extra["code"]` and the like, where an error is passed on


def literals(node: ast.expr) -> Iterator[str]:
    """The texts that an expression for a code may be."""
    match node:
        case ast.Constant(value=str() as text):
            yield text
        case ast.IfExp(body=one, orelse=other):
            yield from literals(one)
            yield from literals(other)
        case ast.BoolOp(values=values):
            for value in values:
                yield from literals(value)
        case ast.JoinedStr(values=[ast.Constant(value=str() as start), *_]):
            yield from VARIABLE[start]


def codes(path: Path) -> Iterator[tuple[str, type[errors.MegaMCPError] | None]]:
    """(code, class of the error tree that it is raised as, or None) for each place of a file that names one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call():
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                kind = getattr(errors, name, None)
                for keyword in node.keywords:
                    if keyword.arg == "code":
                        yield from ((code, kind) for code in literals(keyword.value))
                if name in RESULT_MAKERS and node.args:
                    yield from ((code, None) for code in literals(node.args[0]))
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "code":
                        yield from ((code, None) for code in literals(value))
            case ast.ClassDef():
                yield from _default_code(node)


def _default_code(node: ast.ClassDef) -> Iterator[tuple[str, type[errors.MegaMCPError] | None]]:
    for statement in node.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        names = [getattr(name, "id", "") for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for name in ("default_code", "code"):
            if name in names and value is not None:
                chosen = value.elts[names.index(name)] if isinstance(value, ast.Tuple) else value
                yield from ((code, getattr(errors, node.name, None)) for code in literals(chosen))


def all_codes() -> dict[str, set[int]]:
    """Code → statuses that are known from the class it is raised as."""
    found: dict[str, set[int]] = {}
    for path in sources("megamcp"):
        if path.name == "fake.py":
            continue
        for code, kind in codes(path):
            found.setdefault(code, set()).update({kind.status} if kind and kind is not errors.MegaMCPError else set())
    for path in (ROOT / "megamcp").rglob("*.sql"):
        for code in re.findall(r"refuse\('MM\d+',\s*'(\w+[a-z])'", path.read_text(encoding="utf-8")):
            found.setdefault(code, set())
    return found


def documented_codes() -> dict[str, str]:
    """Code → text of the status column."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+\. \|$", page, re.MULTILINE)
    assert len(rows) == len(dict(rows)) == page.count("\n| `")
    return dict(rows)


def test_every_error_code_is_documented_and_no_other() -> None:
    found, listed = all_codes(), documented_codes()
    assert len(found) > 100
    assert set(found) - set(listed) == set()
    assert set(listed) - set(found) == set()


def without_hint() -> set[str]:
    """Codes that some place gives without saying what to do, or for certain only by `HINTS`."""
    found: set[str] = set()
    for path in sources("megamcp"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                hint = given.get("hint")
                last = hint.values[-1] if isinstance(hint, ast.BoolOp) else hint
                if "code" in given and not isinstance(last, ast.Constant | ast.JoinedStr | ast.BinOp):
                    found.update(literals(given["code"]))
            elif isinstance(node, ast.ClassDef):
                found.update(code for code, _ in _default_code(node))
    for path in (ROOT / "megamcp").rglob("*.sql"):
        found.update(re.findall(r"refuse\('MM\d+',\s*'(\w+[a-z])'", path.read_text(encoding="utf-8")))
    return found


def test_every_error_says_what_to_do() -> None:
    listed = documented_codes()
    missing = {code for code in without_hint() if listed.get(code, "tool") != "tool"} - set(HINTS)
    assert missing == set()
    assert set(HINTS) <= set(listed)
    assert errors.NotFound("…", code="checkpoint_not_found").problem()["hint"] == HINTS["checkpoint_not_found"]
    assert errors.NotFound("…", code="checkpoint_not_found", hint="Here.").hint == "Here."


def test_documented_statuses_are_those_of_the_classes() -> None:
    listed = documented_codes()
    for code, statuses in all_codes().items():
        if listed[code] in ("start", "client"):
            continue
        assert all(str(status) in listed[code] for status in statuses), (code, statuses, listed[code])


def test_each_error_class_has_a_line_in_the_tree() -> None:
    tree = errors.__doc__ or ""
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.MegaMCPError):
            assert f" {name} " in f" {tree} ".replace("\n", " \n "), name
            if kind is not errors.MegaMCPError and "default_code" in vars(kind) and "status" in vars(kind):
                assert re.search(rf"{name} +{kind.status} ", tree), name
    assert len(errors.BY_RPC) == len({kind.jsonrpc for kind in errors.BY_RPC.values()})
