"""What the statements of a pg_dump mean here.

Some mean nothing: owners, grants, settings of the session that loaded it, what belongs to the database as a whole
(they are left out, and counted by what they are). Names carry their schema; a state of kind `schema` has only one, so
it is taken off: by tokens, so that it is gone wherever PostgreSQL may write it. What is left is the state's to judge.
"""

import re

import postgast

from megamcp.errors import Unprocessable
from megamcp.loading.script import bad
from megamcp.loading.split import Command, Comment

NEWEST = 18
"""Of PostgreSQL: what the embedded programs and the parser know."""

_LEFT_OUT = (
    (re.compile(rb"alter\s.*\sowner\s+to\s+\S+", re.I | re.S), "owner"),
    (re.compile(rb"(grant|revoke)\s", re.I), "grant"),
    (re.compile(rb"alter\s+default\s+privileges\s", re.I), "grant"),
    (re.compile(rb"security\s+label\s", re.I), "security label"),
    (re.compile(rb"(create|alter)\s+(publication|subscription)\s", re.I), "replication"),
    (re.compile(rb"alter\s+table\s+(only\s+)?\S+\s+replica\s+identity\s", re.I), "replication"),
    (re.compile(rb"alter\s+table\s+(only\s+)?\S+\s+cluster\s+on\s", re.I), "clustering"),
    (re.compile(rb"set\s", re.I), "setting"),
    (re.compile(rb"select\s+pg_catalog\.set_config\(\s*'search_path'", re.I), "setting"),
    (re.compile(rb"select\s+\*\s+from\s+pg_catalog\.pg_restore_(relation|attribute)_stats\(", re.I), "statistics"),
    (re.compile(rb"create\s+extension\s+(if\s+not\s+exists\s+)?plpgsql\b", re.I), "plpgsql"),
    (re.compile(rb"comment\s+on\s+(extension|database)\s", re.I), "comment"),
    (re.compile(rb"(create|alter|drop)\s+database\s", re.I), "database"),
)  # fmt: skip
_CLIENT_ENCODING = re.compile(rb"set\s+client_encoding\s*(?:=|to)\s*'?([\w-]+)", re.I)
_OLD_STRINGS = re.compile(rb"set\s+standard_conforming_strings\s*(?:=|to)\s*'?off", re.I)
_FROM_SERVER = re.compile(rb"-- Dumped from database version (\d+)\S*")
_OF_CLUSTER = b"-- PostgreSQL database cluster dump"
_HARMLESS_COMMANDS = (b"\\restrict", b"\\unrestrict")
_SCHEMA_ITSELF = re.compile(
    r"(?:create\s+schema|alter\s+schema|comment\s+on\s+schema)\s+(?:if\s+not\s+exists\s+)?", re.I
)
_FUNCTION = re.compile(r"create\s+(?:or\s+replace\s+)?(?:function|procedure)\b", re.I)
_BODY_BEGINS = re.compile(r"\$(?:[A-Za-z_][A-Za-z0-9_]*)?\$")
_DOTTED = re.compile(r"^'((?:[^'.\"]|\"[^\"']*\")+)\.")


def left_out(statement: bytes, name: str, line: int) -> str | None:
    """What a statement is that is not run, None for one that is. Raises `Unprocessable` for settings that matter."""
    if encoding := _CLIENT_ENCODING.match(statement):
        if encoding[1].upper().replace(b"-", b"") != b"UTF8":
            raise bad(
                name, f"line {line}: the dump is in {encoding[1].decode()}", "Make it with pg_dump --encoding=UTF8."
            )
    elif _OLD_STRINGS.match(statement):
        raise bad(
            name,
            f"line {line}: its strings are written the old way (standard_conforming_strings = off)",
            "Set standard_conforming_strings to on for the database and dump it again.",
        )
    return next((what for pattern, what in _LEFT_OUT if pattern.match(statement)), None)


def is_of_schema(statement: str, schema: str) -> bool:
    """Whether it makes, changes or comments on the one schema that is taken: there is one already."""
    found = _SCHEMA_ITSELF.match(statement)
    return found is not None and _unquoted(statement[found.end() :].split()[0]) == schema


def check_comment(comment: Comment, name: str) -> None:
    """Raises `Unprocessable` for a dump of a newer server (`postgres_too_new`), or of a whole one."""
    if comment.text.startswith(_OF_CLUSTER):
        raise bad(
            name,
            f"line {comment.line}: this is a dump of all databases and roles of a server, made by pg_dumpall",
            "Dump the one database: pg_dump NAME, or megamcp env load --from-dsn.",
        )
    found = _FROM_SERVER.match(comment.text)
    if found and int(found[1]) > NEWEST:
        raise Unprocessable(
            f"{name}: the dump is of PostgreSQL {found[1].decode()}; this version knows PostgreSQL up to {NEWEST}",
            code="postgres_too_new",
            hint=f"Restore it on PostgreSQL {NEWEST} first, or update MegaMCP.",
        )


def check_command(command: Command, name: str) -> None:
    """Raises `Unprocessable` for a psql command that would have done something."""
    if not command.text.startswith(_HARMLESS_COMMANDS):
        word = command.text.split()[0].decode(errors="replace")
        if is_connect(command):
            raise bad(
                name,
                f"line {command.line}: from here on ({word}) it is of another database",
                "Dump the one database: pg_dump NAME.",
            )
        raise bad(name, f"line {command.line}: the command {word} is psql's and is not followed", "Leave it out.")


def is_connect(command: Command) -> bool:
    """Whether it leads psql to another database: after `pg_dump --create`, to the one that is dumped."""
    return command.text.split()[0] in (b"\\connect", b"\\c")


def empty(name: str, schema: str) -> Exception:
    """The error for a dump that made no table."""
    where = f"no table in schema {schema}" if schema else "no table"
    hint = "source_schema names another one; give the folder or file that pg_dump wrote."
    return bad(name, f"this dump holds {where}", hint)


def unqualified(statement: str, schema: str) -> str:
    """The statement without `schema.` before its names, also in `'schema.seq'::regclass` and in function bodies."""
    if schema not in statement and "pg_catalog.setval" not in statement:
        return statement
    raw = statement.encode()
    try:
        tokens = postgast.scan(statement).tokens
    except postgast.PgQueryError:
        return statement  # PostgreSQL will say what's wrong
    texts = [raw[token.start : token.end].decode() for token in tokens]
    parts: list[str] = []
    done = 0
    body = _FUNCTION.match(statement) is not None
    for n, (token, text) in enumerate(zip(tokens, texts, strict=True)):
        following = texts[n + 1] if n + 1 < len(texts) else ""
        if following == "." and (n == 0 or texts[n - 1] != ".") and _is_dropped(text, schema, texts[n + 2 : n + 3]):
            parts.append(raw[done : token.start].decode())
            done = tokens[n + 1].end
        elif text.startswith("'") and _names_a_relation(texts, n):
            found = _DOTTED.match(text)
            if found and _unquoted(found[1]) == schema:
                parts.append(raw[done : token.start].decode() + "'" + text[found.end() :])
                done = token.end
        elif body and (opening := _BODY_BEGINS.match(text)):
            inside = unqualified(text[opening.end() : -opening.end()], schema)
            parts.append(raw[done : token.start].decode() + opening[0] + inside + opening[0])
            done = token.end
    return "".join(parts) + raw[done:].decode()


def _names_a_relation(texts: list[str], n: int) -> bool:
    if texts[n + 1 : n + 2] == ["::"]:
        return texts[n + 2 : n + 3] in (["regclass"], ["regtype"], ["regproc"], ["regprocedure"])
    return texts[max(n - 1, 0)] == "(" and texts[max(n - 2, 0)] in ("nextval", "currval", "setval")


def _is_dropped(text: str, schema: str, following: list[str]) -> bool:
    if _unquoted(text) == schema:
        return True
    return text == "pg_catalog" and following == ["setval"]  # the state has one of its own


def _unquoted(name: str) -> str:
    name = name.rstrip(";")
    return name[1:-1].replace('""', '"') if name.startswith('"') and name.endswith('"') else name.lower()
