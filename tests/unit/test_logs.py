"""Lines of the log as JSON."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from megamcp.dataplane import watched
from megamcp.logs import JsonLines

NAME = "megamcp.test_logs"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonLines())
    log = logging.getLogger(NAME)
    log.addHandler(handler)
    yield written
    log.removeHandler(handler)


async def test_a_line_says_which_call_of_which_rollout_it_was_written_in(lines: io.StringIO) -> None:
    watched.begin("ro_1", '"seven"')
    call = watched.begin_call("ro_1")
    call.environment, call.server, call.tool = "retail", "shop", "cancel_order"
    try:
        raise ValueError("no such order\nat all")
    except ValueError:
        logging.getLogger(NAME).exception("it ended: %s", "badly")
    (line,) = lines.getvalue().splitlines()
    told = json.loads(line)
    assert told.pop("time").endswith("+00:00")
    assert told.pop("error").endswith("ValueError: no such order\nat all")
    assert told == {
        "level": "error",
        "logger": NAME,
        "message": "it ended: badly",
        "rollout": "ro_1",
        "environment": "retail",
        "server": "shop",
        "tool": "cancel_order",
        "request": '"seven"',
    }


def test_a_line_of_nothing_in_particular_has_no_such_members(lines: io.StringIO) -> None:
    logging.getLogger(NAME).warning("waiting")
    assert set(json.loads(lines.getvalue())) == {"time", "level", "logger", "message"}
