"""Server-sent events: one frame out, an incremental parser in. Knows nothing of what the events carry."""

from collections.abc import Iterator


def sse_event(message: bytes) -> bytes:
    """One event. JSON may be pretty-printed, and a newline inside `data` would end the field."""
    if b"\n" in message or b"\r" in message:
        message = b"\ndata: ".join(message.splitlines())
    return b"event: message\ndata: %b\n\n" % message


class SseReader:
    """Incremental parser of an event stream: `feed` bytes, get the data of the events that are complete.

    Keeps `last_id` and `retry_ms` for resumption. An event over `limit` bytes raises ValueError. An event may come in
    many small parts, so no byte of it is looked at or moved twice.
    """

    __slots__ = ("_buffer", "_data", "_limit", "_searched", "_size", "last_id", "retry_ms")

    def __init__(self, limit: int) -> None:
        self._buffer = bytearray()
        self._searched = 0
        """So much of the buffer holds no end of a line."""
        self._data: list[bytes] = []
        self._size = 0
        self._limit = limit
        self.last_id: str | None = None
        self.retry_ms: int | None = None

    def restart(self) -> None:
        """The stream goes on over another connection: what had come of an event comes again."""
        self._buffer.clear()
        self._searched = 0
        self._data, self._size = [], 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += chunk
        if len(buffer) + self._size > self._limit:
            raise ValueError(f"an event is larger than {self._limit} bytes")
        while (end := _line_end(buffer, self._searched)) is not None:
            stop, following = end
            line = bytes(buffer[:stop])
            del buffer[:following]
            self._searched = 0
            if line:
                self._field(line)
            elif self._data:
                data, self._data, self._size = b"\n".join(self._data), [], 0
                if data:  # an event without data only carries an id to resume from
                    yield data
        self._searched = max(0, len(buffer) - 1)  # a CR may be half of a line's end

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value) + 1
        elif name == b"id" and b"\0" not in value:
            self.last_id = value.decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit():
            self.retry_ms = int(value[:9])


def _line_end(buffer: bytearray, start: int) -> tuple[int, int] | None:
    """(end of the line, start of the next); a lone trailing CR waits for what follows it."""
    newline = buffer.find(b"\n", start)
    carriage = buffer.find(b"\r", start, newline if newline >= 0 else len(buffer))
    if carriage < 0:
        return None if newline < 0 else (newline, newline + 1)
    if carriage + 1 == len(buffer):
        return None
    return carriage, carriage + (2 if buffer[carriage + 1] == 0x0A else 1)
