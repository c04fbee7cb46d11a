"""Forks of one image share no randomness that ought to be unforeseeable."""

import asyncio
import importlib.util

import pytest

from sandboxes.types import Spec
from tests.integration.forkserver.conftest import Server

SOURCES = {
    "random": "import random\nresult = random.random()",
    "secrets": "import secrets\nresult = secrets.token_hex(16)",
    "uuid4": "import uuid\nresult = str(uuid.uuid4())",
    "uuid1": "import uuid\nresult = str(uuid.uuid1())",
    "urandom": "import os\nresult = os.urandom(16).hex()",
    "ssl": "import ssl\nresult = ssl.RAND_bytes(16).hex()",
    "tempfile": "import tempfile\nresult = tempfile.mktemp()",
    "numpy": "import numpy\nresult = numpy.random.random()",
}


@pytest.mark.parametrize("source", SOURCES)
async def test_forks_of_one_image_draw_different_numbers(server: Server, spec: Spec, source: str) -> None:
    if source == "numpy" and importlib.util.find_spec("numpy") is None:
        pytest.skip("numpy is not installed")
    sandbox = await server.start(spec)
    await sandbox.run(SOURCES[source])  # whatever it keeps is there before the fork
    image = (await server.freeze(sandbox)).image
    forks = await asyncio.gather(*(server.start(spec, image) for _ in range(5)))
    drawn = [await one.run(SOURCES[source]) for one in (sandbox, *forks)]
    assert len(set(drawn)) == len(drawn)


async def test_a_generator_that_a_server_seeded_is_its_state_and_is_kept(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    await sandbox.run("import random\nmine = random.Random(7)\nmine.random()")
    fork = await server.fork(spec, sandbox)
    draw = "result = mine.random()"
    assert await sandbox.run(draw) == await fork.run(draw)
