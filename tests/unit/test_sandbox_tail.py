"""What a program prints while it is prepared."""

import asyncio
import sys

from sandboxes.tail import Tail

FLOOD = "import sys\nfor _ in range(300): sys.stdout.write('x' * 99_999 + '\\n')\nprint('the last words')"


async def test_of_a_flood_the_last_words_are_kept_and_nothing_waits() -> None:
    tail = Tail()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOD, stdout=tail.output)
    tail.started()
    async with asyncio.timeout(60):
        assert await process.wait() == 0
    told = tail.text()
    assert told.endswith("\nthe last words")
    assert len(told) <= 4000
    tail.close()
