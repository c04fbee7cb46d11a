"""Server-sent events: one frame out, an incremental parser in. Knows nothing of what the events carry."""

from collections.abc import Iterator


def sse_event(message: bytes) -> bytes:
    """One event. JSON may be pretty-printed, and a newline inside `data` would end the field."""
    if b"\n" in message or b"\r" in message:
        message = b"\ndata: ".join(message.splitlines())
    return b"event: message\ndata: %b\n\n" % message


class SseReader:
    """Incremental parser of an event stream: `feed` bytes, get the data of the events that are complete.

    Keeps `last_id` and `retry_ms` for resumption. An event over `limit` bytes raises ValueError.
    """

    __slots__ = ("_buffer", "_data", "_limit", "_size", "last_id", "retry_ms")

    def __init__(self, limit: int) -> None:
        self._buffer = b""
        self._data: list[bytes] = []
        self._size = 0
        self._limit = limit
        self.last_id: str | None = None
        self.retry_ms: int | None = None

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        buffer = self._buffer + chunk
        if len(buffer) + self._size > self._limit:
            raise ValueError(f"an event is larger than {self._limit} bytes")
        start = 0
        while True:
            end = _line_end(buffer, start)
            if end is None:
                break
            stop, following = end
            line = buffer[start:stop]
            start = following
            if line:
                self._field(line)
            elif self._data:
                data, self._data, self._size = b"\n".join(self._data), [], 0
                if data:  # an event without data only carries an id to resume from
                    yield data
        self._buffer = buffer[start:]

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value)
        elif name == b"id" and b"\0" not in value:
            self.last_id = value.decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit():
            self.retry_ms = int(value[:9])


def _line_end(buffer: bytes, start: int) -> tuple[int, int] | None:
    """(end of the line, start of the next); a lone trailing CR waits for what follows it."""
    newline = buffer.find(b"\n", start)
    carriage = buffer.find(b"\r", start, newline if newline >= 0 else len(buffer))
    if carriage < 0:
        return None if newline < 0 else (newline, newline + 1)
    if carriage + 1 == len(buffer):
        return None
    return carriage, carriage + (2 if buffer[carriage + 1] == 0x0A else 1)
