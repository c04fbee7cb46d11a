"""The engine, asked through the Docker SDK in threads. Its errors become `SandboxError`.

The SDK is an extra and takes long to import, so that happens at the first request. Nothing here knows what a
sandbox is.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sandboxes.types import SandboxError

Result = TypeVar("Result")

_LONGEST_S = 600
_AT_ONCE = 8


class Engine:
    """Connected to when it is first asked. Where it is, `DOCKER_HOST` says, as for the `docker` command."""

    def __init__(self) -> None:
        self._api: Any = None
        self._threads = ThreadPoolExecutor(_AT_ONCE, "docker")

    async def ask(self, work: Callable[[Any], Result], code: str = "failed") -> Result:
        """What `work` returns for the SDK's `APIClient`. An error of the engine's has this code.

        Being cancelled waits for the engine: what it was asked for is then there, and can be taken away.
        """
        done = asyncio.get_running_loop().run_in_executor(self._threads, self._worked, work, code)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait({done})
            raise

    def _worked(self, work: Callable[[Any], Result], code: str) -> Result:
        try:
            import docker
        except ImportError as error:
            raise SandboxError(
                "not_available",
                "the Python package `docker` is not installed",
                hint="pip install 'megamcp[docker]'",
            ) from error
        from docker.errors import APIError, DockerException
        from requests.exceptions import RequestException
        from urllib3.exceptions import HTTPError

        _knock()
        try:
            if self._api is None:
                self._api = docker.DockerClient.from_env(timeout=_LONGEST_S, max_pool_size=_AT_ONCE).api
            return work(self._api)
        except APIError as error:
            told = str(error.explanation or error)
            full = "no space left" in told.lower()
            hint = "Make room where the engine has its images: docker system df." if full else ""
            raise SandboxError("disk_full" if full else code, f"Docker: {told[-1000:]}", hint=hint) from error
        except (DockerException, RequestException, HTTPError, ConnectionError) as error:
            raise SandboxError("engine_lost", f"no Docker engine answers: {error}") from error

    def close(self) -> None:
        """Waits for what is under way."""
        self._threads.shutdown()
        if self._api is not None:
            self._api.close()


def _knock() -> None:
    """Whether somebody listens on the engine's unix socket: the SDK says it at length, and leaves its own one open."""
    where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if where.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as knocking:
            try:
                knocking.connect(where.removeprefix("unix://"))
            except OSError as error:
                raise SandboxError("engine_lost", f"no Docker engine answers at {where}: {error.strerror}") from error


def attached(api: Any, container: str) -> socket.socket:
    """The stream of a container's stdin, stdout and stderr: to be opened before the container is started."""
    held = api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    inner: socket.socket = held._sock
    try:
        own = inner.dup()
        own.setblocking(False)
        return own
    finally:
        held._response.close()
        inner.close()


def is_absent(work: Callable[[], object]) -> bool:
    """Does something to what may be gone already; True where it was."""
    from docker.errors import NotFound

    try:
        work()
    except NotFound:
        return True
    return False
