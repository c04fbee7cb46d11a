"""The search for a backend: ask where the login leads, connect, and again until it works.

A database that is being cloned refuses connections (55000), one that is being renamed isn't there for a moment
(3D000), a server that starts says 57P03 or nothing: all of that passes, and the caller's patience bounds it. What can't
pass is raised at once, in words for the client, who never sees the server's own: these hold names that aren't his.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from megamcp import errors
from megamcp.relay import messages
from megamcp.relay.backend import Backend, Refused, Route, Unusable, log_in
from megamcp.relay.login import Turned
from megamcp.relay.memory import Memory

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.1
_FINAL: Final = (errors.NotFound, errors.Gone, errors.Unauthorized, errors.Unprocessable, errors.BadRequest)


async def found(
    resolve: Callable[[], Awaitable[Route]], parameters: Mapping[str, str], memory: Memory, timeout_s: float
) -> Backend:
    """A backend that is set up as `memory` says, however often it takes. Raises Turned."""
    pause = _FIRST_PAUSE_S
    while True:
        try:
            route = await resolve()
            async with asyncio.timeout(timeout_s):
                return await log_in(route, parameters, memory)
        except _FINAL as error:
            raise Turned(messages.refusal(error)) from None
        except Refused as error:
            if error.by_parameters:
                raise Turned(messages.error_response(error.sqlstate, error.text)) from None
            reason = error.sqlstate
        except Unusable as error:
            _log.warning("A database can't be used through the relay: %s", error)
            text = "The database of this login can't be used through the relay."
            raise Turned(messages.error_response("58000", text)) from None
        except (OSError, TimeoutError, errors.MegaMCPError) as error:
            reason = type(error).__name__
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        if pause < _LONGEST_PAUSE_S:
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
            if pause == _LONGEST_PAUSE_S:
                _log.info("A client of the relay waits for its database: %s", reason)
