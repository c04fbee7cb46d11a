"""Lines of the log: as text for people, or as JSON documents, one a line, that say which rollout they are about.

No secret is ever logged: DSNs, handles and keys are never arguments of a log call.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from megamcp.dataplane.watched import doing

_KNOWN = ("rollout", "environment", "server", "tool", "request")


class JsonLines(logging.Formatter):
    """A document with `time`, `level`, `logger`, `message`, `error` where there is a traceback, and what is known of
    the message or call that the line was written in: `rollout`, `environment`, `server`, `tool`, `request` (the
    client's JSON-RPC id)."""

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (now := doing()) is not None:
            for name in _KNOWN:
                if (value := getattr(now, name)) is not None:
                    document[name] = value[:200]
        if record.exc_info:
            document["error"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)


def configure_logging(level: str, form: Literal["text", "json"] = "text") -> None:
    """Lines on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("alembic", "uvicorn"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
