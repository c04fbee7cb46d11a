"""A state that another version of MegaMCP made is told from one of this one."""

from dataclasses import replace

import pytest

from megamcp.definitions import ServerConfig
from megamcp.environments import LoadedServer
from megamcp.errors import Gone
from megamcp.state import SchemaState
from megamcp.state.schema import COMPILER_VERSION

NOW = SchemaState("0" * 16, (), "deployment", COMPILER_VERSION)


def test_a_schema_of_another_compiler_takes_no_new_rollouts() -> None:
    server = LoadedServer("s", ServerConfig(url="http://localhost/mcp"), NOW)
    server.demand_current()
    for other in (replace(NOW, compiler=COMPILER_VERSION - 1), SchemaState.from_json({**NOW.to_json(), "compiler": 0})):
        with pytest.raises(Gone) as told:
            replace(server, schema=other).demand_current()
        assert told.value.code == "state_outdated"
