"""Who did what: one line of JSON for each admin and lifecycle action, done or refused. Never what was shown for it.

Appended to a file (`MEGAMCP_AUDIT_LOG`), or logged by `megamcp.audit` where the gateway wants keys. Not a table: a row
would cost each checkpoint and fork a round trip, and whoever reads audits wants them where the database's admin can't
change them. A line is one write, so that processes that share the file don't mix theirs.
"""

import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

from megamcp.access.principal import Principal

log = logging.getLogger("megamcp.audit")


class Audit:
    """Writes lines. Does nothing where no keys are wanted and no file is named."""

    def __init__(self, path: Path | None, *, wanted: bool) -> None:
        self._wanted = wanted
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def tell(
        self, who: Principal | None, deed: str, target: str | None, *, status: int, address: str | None = None
    ) -> None:
        """`deed` as `rights` names it, `target` what it was done to, `status` of HTTP."""
        if self._file is None and not self._wanted:
            return
        line = json.dumps(
            {
                "at": datetime.now(UTC).isoformat(),
                "who": who and {"id": who.id, "name": who.name, "scope": who.scope, "tenant": who.tenant},
                "from": address,
                "deed": deed,
                "target": target,
                "status": status,
            }
        )
        if self._file is None:
            log.info("%s", line)
            return
        try:
            os.write(self._file, line.encode() + b"\n")
        except OSError as error:
            log.error("the audit log can't be written (%s): %s", error, line)

    def close(self) -> None:
        """Nothing is told afterwards."""
        if self._file is not None:
            os.close(self._file)
            self._file, self._wanted = None, False
