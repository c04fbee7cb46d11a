"""A house of each test's own."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.integration.relay.house import House, house


@pytest_asyncio.fixture(loop_scope="session")
async def home(postgres_dsn: str) -> AsyncIterator[House]:
    async with house(postgres_dsn) as made:
        yield made
