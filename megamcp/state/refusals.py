"""What the copy-on-write state refuses in a statement: each entry says the construct, why, and the way out.

Only data and name tests live here; `statements.py` finds the constructs in a parse tree. A name is compared
as the parser gives it (unquoted identifiers are folded already; a quoted `"Now"` is another function).

What these tables do not do: they are no security border. Tool roles own nothing and may touch only the views;
PostgreSQL's privileges hold whatever a statement says. The tables turn statements that would be *inexact*
(another clock, locks that lock nothing, settings that stay in a pooled connection) into clear errors.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason to refuse a statement."""

    construct: str
    reason: str
    hint: str


_NOTHING_STAYS = "a call owns nothing outside its transaction and its rollout's rows"
_SCHEMA_IS_LOADED = "the schema of an environment is loaded once and shared by all its rollouts"
_IN_SCHEMA = "Put it in the environment's schema file, or use state of kind `database`."
_OWN_CLOCK = "it reads the machine's clock, not the environment's"
_DATABASE = "Use state of kind `database` for full SQL."

TRANSACTION = Refusal(
    "transaction control",
    "the SDK owns the transaction: the call's row, effects and result commit together",
    "Raise ToolError to undo the call; use `async with db.begin_nested()` for a part of it.",
)
SEVERAL = Refusal("more than one statement", "each statement is checked and run by itself", "Send them one by one.")
NOT_TEXT = Refusal(
    "invalid text", "SQL must be valid Unicode without NUL", "Pass values as parameters, bytes as bytea."
)
TOO_LONG = Refusal(
    "statement too long",
    "the text is over 1 MiB",
    "Split it, or pass the data as parameters (arrays and unnest).",
)
TOO_DEEP = Refusal(
    "statement nested too deep",
    "it can't be parsed safely",
    "Flatten it: IN (…) or = any(array) for OR chains, concat() or string_agg() for long || chains.",
)
_CONFLICT = "INSERT … ON CONFLICT"
NESTED_CONFLICT = Refusal(
    f"{_CONFLICT} in WITH, with a WITH of its own", "both would have to come first", "Lift the inner WITH out of it."
)
STATEMENT_TRIGGERS = Refusal(
    "ON CONFLICT or OVERRIDING on a table with triggers FOR EACH STATEMENT",
    "the rows go through another view, which has no such triggers",
    "Use row triggers, or MERGE.",
)
TOO_WIDE = Refusal(
    f"{_CONFLICT} into a table of over 780 columns", "the view beside it would be too wide", "Use MERGE."
)
SEVERAL_KEYS = Refusal(
    f"{_CONFLICT} DO UPDATE over several keys at once", "each may meet another row", "Name one key by ON CONSTRAINT."
)
GROUPED_BY_KEY = Refusal(
    "GROUP BY a primary key beside a column whose type has no equality",
    "a view has no primary key",
    "Add that column to the query outside of the groups, or cast it to text.",
)
OUR_NAMES = Refusal(
    f"{_CONFLICT} beside a name that begins with _mm_", "the rewritten statement has such names", "Take another name."
)
SET_OF_SUBSELECT = Refusal(
    f"{_CONFLICT} DO UPDATE SET (…) = (SELECT …)", "its columns can't be taken apart", "Assign them one by one."
)
SET_OF_PART = Refusal(
    f"{_CONFLICT} DO UPDATE SET of an element or field", "only whole values are assigned", "Assign the whole column."
)
SET_TO_DEFAULT = Refusal(
    f"{_CONFLICT} DO UPDATE SET … = DEFAULT", "the default is known to the table alone", "Write the value."
)
PARAMETER_IN_TARGET = Refusal(
    f"parameter in the target of {_CONFLICT}",
    "which key is meant must be known before it runs",
    "Write the predicate as the index has it.",
)
SET_TO_ROW = Refusal(
    f"{_CONFLICT} DO UPDATE SET … = ROW(…)", "the type of such a row would be lost", "Cast it: ROW(…)::its_type."
)
OLD_ROWS = Refusal(
    f"old and new in RETURNING of {_CONFLICT}",
    "the row goes through another view",
    "Name the columns without old or new.",
)
VIEW_CONFLICT = Refusal(
    f"{_CONFLICT} or OVERRIDING into a view of the environment",
    "its keys and identity columns are its table's, which only the table's own name leads to",
    "Name the table.",
)
OVERRIDING_CONFLICT = Refusal(f"OVERRIDING with {_CONFLICT}", "they take different ways", "Use one of them.")
OVERRIDING = Refusal(
    "OVERRIDING in MERGE",
    "a view has no identity columns, so PostgreSQL would ignore it",
    "Leave the column out, or use INSERT … OVERRIDING.",
)
DYNAMIC = Refusal("EXECUTE in PL/pgSQL", "its statement could not be checked", "Write the statement itself.")
_FUNCTION = "a function's text is not rewritten when it runs"
IN_FUNCTION = {
    "MergeStmt": Refusal(
        "MERGE in a function", "its rows can't be told from the caller's", "Use INSERT, UPDATE, DELETE."
    ),
    "TruncateStmt": Refusal("TRUNCATE in a function", _FUNCTION, "Use DELETE."),
    "ConstraintsSetStmt": Refusal("SET CONSTRAINTS in a function", _FUNCTION, "Send it from the tool."),
    "lock": Refusal("SELECT … FOR UPDATE/SHARE in a function", _FUNCTION, "Leave it out: a call that writes is alone."),
    "override": Refusal("OVERRIDING in a function", _FUNCTION, "Write it in the tool server."),
    "several": Refusal("a command in a function that writes several tables", _FUNCTION, "Write one after another."),
    "kind": Refusal("function with another kind of statement", "only queries and writes can be exact", _DATABASE),
}
MERGE_AND_MORE = Refusal(
    "MERGE and another write in one command",
    "rows that it must not touch twice can't be told from the other part's",
    "Run them one after another.",
)
ROW_LOCK = Refusal("SELECT … FOR UPDATE/SHARE in a query", "this endpoint reads", "Leave it out.")
SAMPLE = Refusal(
    "TABLESAMPLE",
    "it samples physical pages, which hold other rollouts' rows",
    "Use ORDER BY random() LIMIT n.",
)
CURRENT_OF = Refusal("WHERE CURRENT OF", "a cursor over a view has no current row", "Update by primary key.")
WITH_HOLD = Refusal(
    "DECLARE … WITH HOLD", f"it would outlive the call: {_NOTHING_STAYS}", "Declare it without WITH HOLD."
)
SELECT_INTO = Refusal("SELECT INTO", f"it makes a table: {_SCHEMA_IS_LOADED}", "Use a CTE, or fetch the rows.")
TIME_LITERAL = Refusal("'now', 'today', 'tomorrow' or 'yesterday' as a time", _OWN_CLOCK, "Use now() and intervals.")
EXPLAIN = Refusal("EXPLAIN", "estimates tell of rows of other rollouts", "Run the query itself.")
NOT_A_QUERY = Refusal(
    "a statement that is no query",
    "this endpoint reads",
    "Send one SELECT, VALUES, TABLE or WITH … SELECT; change state by calling tools.",
)
NO_SEQUENCE_MOVES = Refusal("nextval() or setval() in a query", "this endpoint reads", "Change state by calling tools.")
NO_SLEEP = Refusal("pg_sleep() in a query", "it holds a connection for nothing", "Leave it out.")

# Statements by parse-tree node. What is in no table is refused too: new syntax starts refused.
READ_STATEMENTS = frozenset({"SelectStmt"})
WRITE_STATEMENTS = frozenset({"InsertStmt", "UpdateStmt", "DeleteStmt", "MergeStmt"})
OTHER_STATEMENTS = frozenset({"TruncateStmt", "ConstraintsSetStmt", "FetchStmt", "ClosePortalStmt", "VariableShowStmt"})
CURSOR_STATEMENTS = frozenset({"DeclareCursorStmt", "FetchStmt", "ClosePortalStmt"})
_STATEMENTS = {
    "CopyStmt": Refusal("COPY", "it bypasses views", "Use INSERT with arrays and unnest(), and SELECT."),
    "LockStmt": Refusal("LOCK", "it would lock every rollout's rows", "Leave it out: the rollout is locked already."),
    "PrepareStmt": Refusal("PREPARE", "the driver prepares statements itself", "Use parameters."),
    "ExecuteStmt": Refusal("EXECUTE", "its statement could not be checked", "Use parameters."),
    "DeallocateStmt": Refusal("DEALLOCATE", "the driver owns prepared statements", "Leave it out."),
    "ListenStmt": Refusal("LISTEN", f"{_NOTHING_STAYS}", "Poll a table instead."),
    "UnlistenStmt": Refusal("UNLISTEN", f"{_NOTHING_STAYS}", "Leave it out."),
    "NotifyStmt": Refusal("NOTIFY", "it would reach other rollouts", "Write a row instead."),
    "DoStmt": Refusal("DO", "its body could not be checked", "Write the logic in the tool."),
    "CallStmt": Refusal("CALL", "a procedure may control transactions", "Use a function, or the tool."),
    "CreateTableAsStmt": Refusal("CREATE TABLE AS", _SCHEMA_IS_LOADED, "Use a CTE, or fetch the rows."),
    "DiscardStmt": Refusal("DISCARD", "the connection is shared by calls", "Leave it out."),
    "LoadStmt": Refusal("LOAD", "it runs outside any rollout", _DATABASE),
    "CheckPointStmt": Refusal("CHECKPOINT", "it runs outside any rollout", "Leave it out."),
    "VacuumStmt": Refusal("VACUUM or ANALYZE", "the gateway cares for the tables", "Leave it out."),
    "ClusterStmt": Refusal("CLUSTER", "the gateway cares for the tables", "Leave it out."),
    "ReindexStmt": Refusal("REINDEX", "the gateway cares for the tables", "Leave it out."),
    "GrantStmt": Refusal("GRANT or REVOKE", _SCHEMA_IS_LOADED, "Leave it out."),
    "GrantRoleStmt": Refusal("GRANT or REVOKE", _SCHEMA_IS_LOADED, "Leave it out."),
    "AlterSystemStmt": Refusal("ALTER SYSTEM", "it changes every rollout", _DATABASE),
    "TransactionStmt": TRANSACTION,
}
_SAVEPOINTS = frozenset({"TRANS_STMT_SAVEPOINT", "TRANS_STMT_RELEASE", "TRANS_STMT_ROLLBACK_TO"})


def is_savepoint(kind: str) -> bool:
    """True for SAVEPOINT, RELEASE and ROLLBACK TO."""
    return kind in _SAVEPOINTS


def statement(node: str) -> Refusal:
    """The refusal of a statement kind; `node` is its parse-tree name, such as `CreateStmt`."""
    known = _STATEMENTS.get(node)
    if known:
        return known
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", node.removesuffix("Stmt")).upper()
    words = "CREATE TABLE" if words == "CREATE" else words
    return Refusal(words, _SCHEMA_IS_LOADED, _IN_SCHEMA)


# Settings that change plans and limits of this transaction, never results.
_SETTINGS = re.compile(
    r"statement_timeout|lock_timeout|work_mem|hash_mem_multiplier|jit|plan_cache_mode"
    r"|enable_[a-z_]+|(seq|random)_page_cost|cpu_[a-z_]+_cost|(from|join)_collapse_limit"
)


def setting(name: str, local: bool) -> Refusal | None:
    """SET and set_config(): only plan and limit settings, only for the transaction."""
    construct = f"SET {name}" if name else "SET or RESET"
    if not _SETTINGS.fullmatch(name.lower()):
        return Refusal(
            construct,
            "the setting is part of the rollout's binding, or changes results of later calls",
            "Leave it out; convert in the query (AT TIME ZONE, to_char, casts).",
        )
    if not local:
        return Refusal(construct, "it would stay in the connection, which serves other rollouts", "Use SET LOCAL.")
    return None


# Relations
_VISIBLE = re.compile(r"v_[0-9a-f]{16}")
_CATALOGS = frozenset({"pg_catalog", "information_schema"})
# These show what other calls run or hold, or files and settings of the cluster.
_PRIVATE_RELATION = re.compile(
    r"pg_(stat|statio)_.*|pg_stats.*|pg_statistic.*|pg_locks|pg_prepared_.*|pg_cursors|pg_authid|pg_shadow|pg_user"
    r"|pg_largeobject.*|pg_replication.*|pg_publication.*|pg_subscription.*|pg_hba_.*|pg_ident_.*|pg_file_.*"
    r"|pg_backend_memory_.*|pg_shmem_.*|pg_aios|pg_wait_events"
)
SYSTEM_COLUMNS = frozenset({"ctid", "xmin", "xmax", "cmin", "cmax", "tableoid"})


def schema(name: str, visible: str | None, what: str) -> Refusal | None:
    """A qualified name may point at the visible schema and the catalogs only."""
    if name in _CATALOGS or (name == visible if visible else _VISIBLE.fullmatch(name)):
        return None
    return Refusal(
        f"{what} in schema {name!r}",
        "a tool sees only its environment's own schema",
        "Write the name without a schema.",
    )


def relation(name: str) -> Refusal | None:
    """Catalog relations that show other rollouts' work."""
    if not _PRIVATE_RELATION.fullmatch(name):
        return None
    return Refusal(f"relation {name}", "it shows what happens outside the rollout", "Leave it out.")


def twice(table: str) -> Refusal:
    return Refusal(
        f"two parts of one command that write table {table}",
        "which part touched a row can't be told",
        "Run the first as a statement of its own with RETURNING and pass its rows to the next one.",
    )


def system_column(name: str) -> Refusal:
    return Refusal(
        f"system column {name}", "a row of a rollout has no stable physical identity", "Use the primary key."
    )


# Functions. The visible schema holds functions of these names, which come first in the search path. Only the
# bare name is the environment's; the qualified one is the machine's.
SHADOWED = frozenset(
    {
        "now",
        "transaction_timestamp",
        "statement_timestamp",
        "clock_timestamp",
        "timeofday",
        "random",
        "random_normal",
        "gen_random_uuid",
        "uuidv4",
        "uuidv7",
        "nextval",
        "currval",
        "setval",
        "lastval",
        "pg_get_serial_sequence",
    }
)
_CHANCE = frozenset({"setseed", "uuid_generate_v1", "uuid_generate_v1mc", "uuid_generate_v4"})
_DYNAMIC = re.compile(
    r"(query|table|cursor|schema|database)_to_xml(schema)?|query_to_xml_and_xmlschema|table_to_xml_and_xmlschema"
    r"|(schema|database)_to_xml_and_xmlschema|ts_stat|ts_rewrite"
)
_OUTSIDE = re.compile(
    r"lo_.*|loread|lowrite|dblink.*|txid_.*|binary_upgrade_.*|brin_(de)?summarize.*|gin_clean_pending_list"
    r"|currtid2|inet_server_.*|amvalidate|ri_fkey_.*"
)
_HARMLESS_PG = re.compile(
    r"pg_typeof|pg_get_[a-z_]+|pg_[a-z_]+_is_visible|pg_input_is_valid|pg_input_error_info|pg_column_(size|compression)"
    r"|pg_size_(pretty|bytes)|pg_(char_to_encoding|encoding_to_char|client_encoding|encoding_max_length)"
    r"|pg_describe_object|pg_identify_object.*|pg_collation_for|pg_collation_actual_version|pg_is_in_recovery"
    r"|pg_backend_pid|pg_timezone_(names|abbrevs).*|pg_my_temp_schema|pg_sleep(_for|_until)?|pg_lsn.*"
    r"|pg_has_role|pg_options_to_table|pg_index.*_has_property"
    r"|pg_jit_available|pg_tablespace_location|pg_basetype"
)


def function(name: str, qualified: bool, arguments: int) -> Refusal | None:
    """A function of pg_catalog, or an unqualified name; `qualified` when it was written `pg_catalog.name`."""
    construct = f"{'pg_catalog.' if qualified else ''}{name}()"
    if name in SHADOWED or (name == "age" and arguments == 1):
        if not qualified:
            return None
        hint = f"Write {name}() without pg_catalog."
        return Refusal(construct, "it bypasses the environment's clock, chance and counters", hint)
    if name in _CHANCE:
        hint = "Use random() and gen_random_uuid(), or the SDK's random."
        return Refusal(construct, "it is not drawn from the rollout's seed", hint)
    return outside(name, construct)


def outside(name: str, construct: str) -> Refusal | None:
    """A function that reaches out of the rollout's state, wherever it is called."""
    if _DYNAMIC.fullmatch(name):
        return Refusal(construct, "it runs SQL that could not be checked", "Write the query itself.")
    if "advisory" in name and name.startswith("pg_"):
        hint = "Leave it out: calls that may write run one after another per rollout."
        return Refusal(construct, "the lock would be shared with other rollouts and the gateway", hint)
    if _OUTSIDE.fullmatch(name) or (name.startswith("pg_") and not _HARMLESS_PG.fullmatch(name)):
        return Refusal(construct, "it reads or changes things outside the rollout's state", _DATABASE)
    return None
