"""What of a session is taken along to the next backend, and how it is said again there.

Taken along: the client's startup parameters; what PostgreSQL reports by ParameterStatus (client_encoding, DateStyle,
TimeZone, search_path, …), however it was set; settings of the session that were changed by SET, role and custom
settings included; prepared statements, made by Parse or by PREPARE; the channels of LISTEN. Parse and Close are read
from the protocol. For the rest, the tags of completed commands only say *that* something changed; *what* is asked from
the backend, after the transaction and before its lock is given back (`LOOK`).

Not taken along: temporary tables, cursors WITH HOLD, advisory locks of the session, notifications sent while there was
no backend, the seed of random(), SET SESSION AUTHORIZATION, lastval() and currval(), settings that only a function of
the client's own changed and PostgreSQL doesn't report, custom settings whose name is in no text of a query. A session
with more prepared statements than the limits below can't be taken along at all (`too_much`): its client is told when
the backend goes.
"""

import re
from collections.abc import Iterator
from typing import Final

from megamcp.relay import messages
from megamcp.state.names import ident

WHOLE_LIMIT: Final = 256 << 10  # bytes of one Parse; a longer one is passed on in pieces and not remembered
_STATEMENTS_LIMIT: Final = 2 << 20  # bytes of all Parse messages of a session
_COUNT_LIMIT: Final = 5_000
_CUSTOM_LIMIT: Final = 64  # names of custom settings that are asked for
_TEXT_LIMIT: Final = 64 << 10  # bytes of a query that are searched for such names

_REPORTED: Final = (
    "client_encoding",
    "DateStyle",
    "IntervalStyle",
    "TimeZone",
    "application_name",
    "default_transaction_read_only",
    "standard_conforming_strings",
    "scram_iterations",
    "search_path",
)
_CUSTOM_NAME = re.compile(rb"""\bset(?:_config\s*\(\s*|\s+(?:session\s+)?)['"]?([a-z_]\w*(?:\.\w+)+)""", re.IGNORECASE)
_SET_CONFIG = re.compile(rb"\bset_config\b", re.IGNORECASE)
_LOOK_NAME: Final = "megamcp relay"
_LOOK: Final = """
select 'setting', name, setting from pg_catalog.pg_settings where source operator(pg_catalog.=) 'session'
union all select 'setting', name, pg_catalog.current_setting(name, true)
          from pg_catalog.unnest($1::pg_catalog.text[]) name
union all select 'setting', 'role', pg_catalog.current_setting('role')
union all select 'statement', name, case when from_sql then statement end from pg_catalog.pg_prepared_statements
union all select 'channel', channel, null from pg_catalog.pg_listening_channels() channel"""


class Memory:
    """One client's session, as far as it can be said again."""

    def __init__(self) -> None:
        self.reported: dict[str, str] = {}
        self.too_much = False
        self._tagged = False  # a command said that something changed
        self._restless = False  # each transaction may change something
        self.discarded = False  # DISCARD ALL gave the lock of `enter` away
        self.channels: list[str] = []
        self._settings: dict[str, str] = {}
        self._statements: dict[bytes, bytes] = {}  # name → Parse
        self._made_by_sql: dict[bytes, str] = {}  # name → PREPARE
        self._bytes = 0
        self._custom: dict[str, None] = {}

    # -- what the conversation notices -----------------------------------------------------------------------------

    def parsed(self, whole: bytes) -> None:
        """The backend accepted this Parse message; empty: it was too long to be kept."""
        if not whole:
            self.too_much = True
            return
        (name,) = messages.strings(whole[5:], 1)
        self.forget(name)
        self._statements[name] = whole
        self._bytes += len(whole)
        if self._bytes > _STATEMENTS_LIMIT or len(self._statements) > _COUNT_LIMIT:
            self.too_much = True
            self.forget(name)

    def closed(self, whole: bytes) -> None:
        """The backend accepted this Close message."""
        if whole[5:6] == b"S":
            self.forget(whole[6:-1])

    def forget(self, name: bytes) -> None:
        self._bytes -= len(self._statements.pop(name, b""))
        self._made_by_sql.pop(name, None)

    def read(self, text: bytes) -> None:
        """The text of a query goes by. Names of custom settings, which PostgreSQL lists nowhere, are picked out; and
        that `set_config` is in use, after which each transaction may have changed a setting."""
        self._restless = self._restless or _SET_CONFIG.search(text, 0, _TEXT_LIMIT) is not None
        for found in _CUSTOM_NAME.findall(text[:_TEXT_LIMIT]):
            if len(self._custom) < _CUSTOM_LIMIT:
                self._custom[found.decode("latin-1").lower()] = None

    def completed(self, tag: bytes) -> None:
        """A command ended with this tag."""
        match tag.rstrip(b"\0"):
            case b"SET" | b"PREPARE" | b"LISTEN":
                self._tagged = True
            case b"RESET":
                self._tagged = self._tagged or bool(self._settings)
            case b"UNLISTEN":
                self._tagged = self._tagged or bool(self.channels)
            case b"DEALLOCATE":
                self._tagged = self._tagged or bool(self._statements or self._made_by_sql)
            case b"DEALLOCATE ALL":
                self._forget_statements()
            case b"DISCARD ALL":
                self._forget_statements()
                self._settings, self.channels = {}, []
                self.discarded = True

    def _forget_statements(self) -> None:
        self._statements, self._made_by_sql, self._bytes = {}, {}, 0
        self.too_much = False

    @property
    def stale(self) -> bool:
        """A look is due."""
        return self._tagged or self._restless

    # -- looking ---------------------------------------------------------------------------------------------------

    def look(self) -> bytes:
        """Messages that ask the backend; the rows of the answer belong to `looked`."""
        names = "{" + ",".join(f'"{name}"' for name in self._custom) + "}"
        return b"".join(
            (
                messages.parse(_LOOK_NAME, _LOOK),
                messages.bind(_LOOK_NAME, [names]),
                messages.EXECUTE,
                messages.close_statement(_LOOK_NAME),
                messages.SYNC,
            )
        )

    def looked(self, rows: list[bytes]) -> None:
        """Takes what was found in place of what was known."""
        settings, channels, by_sql, alive = dict[str, str](), list[str](), dict[bytes, str](), {b""}
        for kind, name, value in map(messages.row_values, rows):
            assert name is not None
            if kind == b"setting" and value is not None:
                settings[name.decode(errors="surrogateescape")] = value.decode(errors="surrogateescape")
            elif kind == b"channel":
                channels.append(name.decode(errors="surrogateescape"))
            elif kind == b"statement":
                alive.add(name)
                if value is not None:
                    by_sql[name] = value.decode(errors="surrogateescape")
        for name in [name for name in self._statements if name not in alive]:
            self.forget(name)
        self._settings, self.channels, self._made_by_sql = settings, channels, by_sql
        self._tagged = False

    def unseen(self) -> None:
        """The look failed: what changed isn't known, so nothing can be taken along."""
        self.too_much, self._tagged, self._restless = True, False, False

    # -- saying it again -------------------------------------------------------------------------------------------

    def steps(self, reported: dict[str, str]) -> Iterator[bytes]:
        """Messages for a new backend that reported these parameters; one ReadyForQuery answers each."""
        changed = {
            name: self.reported[name]
            for name in _REPORTED
            if name in self.reported and self.reported[name] != reported.get(name)
        }
        settings = changed | self._settings
        for name in sorted(settings, key=lambda name: name == "role"):  # a lesser role may not set the others
            yield _run("select pg_catalog.set_config($1, $2, false)", name, settings[name])
        for channel in self.channels:
            yield _run(f"listen {ident(channel)}")
        for text in self._made_by_sql.values():
            # PostgreSQL keeps the whole string that a PREPARE was in. As an extended query, one with other commands
            # in it is refused, so that nothing is done twice.
            yield _run(text)
        for key, parse in self._statements.items():
            if key:
                yield parse + messages.SYNC
        if unnamed := self._statements.get(b""):
            yield unnamed + messages.SYNC


def _run(sql: str, *values: str) -> bytes:
    statement = messages.parse("", sql) + messages.bind("", values) + messages.EXECUTE
    return statement + messages.close_statement("") + messages.SYNC  # a client's Bind must not find it
