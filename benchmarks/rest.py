"""A gateway's REST as benchmarks use it: what isn't answered with success is an error of the benchmark."""

from typing import Any

import aiohttp


class Rest:
    """On a session that has the gateway's address."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer's JSON. Raises RuntimeError."""
        async with self._http.post(path, json=body) as answer:
            found = await answer.json()
            if answer.status >= 300:
                raise RuntimeError(f"{path}: {found}")
            return found
