"""SQL of a state's time, chance and sequences: everything that draws from counters of the chain.

Counters are rows (layer, name, value) of `s_<h>."~counters"`; the newest layer of the chain wins, layer 0 holds what
the seeds left. Within a transaction a counter lives in a transaction-local setting `megamcp.c<n>` = `head:value` (after
setval(…, false): `head:value:what currval says`), and a deferred trigger writes it once, at COMMIT: an UPDATE a draw
would leave as many dead row versions as draws.
In a READ ONLY transaction nothing is written, so draws there repeat in the next call.

A tool can set those settings by itself. That harms nobody: they count in its own rollout's state only.
"""

from megamcp.state.catalog import Sequence
from megamcp.state.names import body_quote, hidden, ident, literal
from megamcp.state.queries import named

RANDOM, CLOCK, FIRST_SEQUENCE = 0, 1, 2

_SQL = named("clock.sql")

# Built-ins that read the wall clock: v_<h> shadows each with the environment's clock.
_CLOCK_NAMES = ("transaction_timestamp", "statement_timestamp", "clock_timestamp")

# What a tool role may call. Every other function of s_<h> is for the control role alone.
SHADOWED = ("now", *_CLOCK_NAMES, "timeofday", "age", "random", "random_normal", "gen_random_uuid", "uuidv4", "uuidv7",
            "setseed", "nextval", "currval", "setval", "lastval", "pg_get_serial_sequence", "current_date",
            "current_time", "current_timestamp", "localtime", "localtimestamp")  # fmt: skip


def core(state: str, visible: str) -> str:
    """Counters, clock and chance of a state; made before its DDL runs, so that the DDL's `now()` is ours."""
    text = _SQL["core"].format(s=ident(state), v=ident(visible))
    for name in _CLOCK_NAMES:
        text += (
            f"create function {ident(visible)}.{name}() returns timestamptz language sql stable "
            f"return {ident(visible)}.now();\n"
        )
    text += (
        f"create function {ident(visible)}.timeofday() returns text language sql stable return "
        f"to_char({ident(visible)}.now(), 'Dy Mon DD HH24:MI:SS.US YYYY TZ');\n"
        f"create function {ident(visible)}.age(timestamptz) returns interval language sql stable return "
        f"age({ident(visible)}.now()::date::timestamptz, $1);\n"
        f"create function {ident(visible)}.age(timestamp) returns interval language sql stable return "
        f"age({ident(visible)}.now()::date::timestamp, $1);\n"
    )
    return text


def next_value(state: str, name: str) -> str:
    """The call that takes the next value of a sequence."""
    return f"{ident(state)}.{ident(hidden(name, 'next'))}()"


_UNCALLED = 1_000_000
"""Numbers of counters that hold at which `last` of its sequence nothing was handed out, above those of all others."""


def _never(sequence: Sequence) -> int:
    """No `last` of the sequence."""
    return -(2**63) if sequence.increment > 0 else 2**63 - 1


def shown(state: str, visible: str, found: tuple[Sequence, ...]) -> str:
    """What `select … from the_sequence` reads, by its name. Run as the view role."""
    return "".join(
        f"create view {ident(visible)}.{ident(q.name)} as select * from {shown_by(state, q.name)};\n" for q in found
    )


def shown_by(state: str, name: str) -> str:
    """The call that gives what a sequence shows."""
    return f"{ident(state)}.{ident(hidden(name, 'shown'))}()"


def setting(sequence: Sequence) -> str:
    """The transaction-local setting that holds `head:last value` of a sequence."""
    return f"megamcp.c{sequence.number + FIRST_SEQUENCE - 1}"


def sequences(state: str, visible: str, found: tuple[Sequence, ...]) -> str:
    """One function a sequence, and nextval, currval, setval and lastval by name for the tool's own statements."""
    s, v = ident(state), ident(visible)
    parts = [_sequence(s, state, sequence) for sequence in found]
    never = "when null then null "  # a CASE needs an arm
    arms = {
        "next": "".join(f"when {literal(q.name)} then {next_value(state, q.name)} " for q in found) or never,
        "set": "".join(
            f"when {literal(q.name)} then {s}.{ident(hidden(q.name, 'set'))}(value, is_called) " for q in found
        )
        or never,
        "setting": "".join(f"when {literal(q.name)} then {literal(setting(q))} " for q in found) or never,
    }
    owned = ", ".join(
        f"({literal(q.owner)}::text, {literal(q.owner_column)}::text, {literal(q.name)}::text)"
        for q in found
        if q.owner and q.owner_column
    )
    arms["owned"] = owned or "(null::text, null::text, null::text)"
    parts.append(_SQL["sequences"].format(s=s, v=v, schema=literal(visible), **arms))
    return "".join(parts)


def _sequence(s: str, state: str, sequence: Sequence) -> str:
    name, number = literal(f"sequence:{sequence.name}"), sequence.number + FIRST_SEQUENCE - 1
    mark = f"{_UNCALLED + number}, {literal(f'uncalled:{sequence.name}')}"
    never = _never(sequence)
    called = f'if {s}."~read"({mark}) <> {never} then\n    perform {s}."~store"({mark}, {never});\n  end if;'
    up = sequence.increment > 0
    limit, first = (sequence.maximum, sequence.minimum) if up else (sequence.minimum, sequence.maximum)
    word = "maximum" if up else "minimum"
    if sequence.cycle:
        past = f"_value := {first};\n  {called}"  # else it would meet the mark again
    else:
        message = literal(f'nextval: reached {word} value of sequence "{sequence.name}" ({limit})'.replace("%", "%%"))
        past = f"raise exception {message} using errcode = '2200H';"
    body = f"""declare
  _value numeric := {s}."~read"({number}, {name})::numeric + ({sequence.increment});
  _done text;
begin
  if _value {">" if up else "<"} {limit} then
    {past}
  end if;
  _done := set_config('megamcp.last', '{number}', true);
  return {s}."~store"({number}, {name}, _value::bigint);
end"""
    bounds = literal(
        f'setval: value % is out of bounds for sequence "{sequence.name.replace("%", "%%")}" '
        f"({sequence.minimum}..{sequence.maximum})"
    )
    set_body = f"""declare
  _before text := current_setting({literal(setting(sequence))}, true);
  _done text;
begin
  if value < {sequence.minimum} or value > {sequence.maximum} then
    raise exception {bounds}, value using errcode = '22003';
  end if;
  perform megamcp.verified(true);
  if is_called then
    perform {s}."~store"({number}, {name}, value);
  {called}
  else  -- the next value is this one, and what the call drew last stays what it was
    perform {s}."~store"({number}, {name}, value - ({sequence.increment}));
    perform {s}."~store"({mark}, value - ({sequence.increment}));
    _done := set_config({literal(setting(sequence))}, current_setting({literal(setting(sequence))}) || ':'
      || coalesce(split_part(_before, ':', case when _before like '%:%:%' then 3 else 2 end), ''), true);
  end if;
  return value;
end"""
    shown_body = f"""declare
  _value bigint := {s}."~read"({number}, {name});
begin
  is_called := _value <> {s}."~read"({mark});
  last_value := case when is_called then _value else _value + ({sequence.increment}) end;
  log_cnt := 0;  -- how many numbers the write-ahead log is ahead: a state has none
  return next;
end"""
    head = "language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as"
    unset = never if sequence.called else sequence.last
    return (
        f'insert into {s}."~counters" (layer, number, name, value)'
        f" values (0, {number}, {name}, {sequence.last}), (0, {mark}, {unset});\n"
        f"create function {shown_by(state, sequence.name)} returns table (last_value bigint, log_cnt bigint,"
        f" is_called boolean) {head} {body_quote(shown_body)};\n"
        f"create function {next_value(state, sequence.name)} returns bigint {head} {body_quote(body)};\n"
        f"create function {s}.{ident(hidden(sequence.name, 'set'))}(value bigint, is_called boolean) "
        f"returns bigint {head} {body_quote(set_body)};\n"
    )
