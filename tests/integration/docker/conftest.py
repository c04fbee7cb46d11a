"""A keeper's Docker runtime against a real engine. Skipped, with the reason, where there is none."""

import os
import secrets
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandboxes.docker import Containers
from sandboxes.runtime import Folders
from sandboxes.types import Exited, Kind, Spec

BASE = os.environ.get("MEGAMCP_TEST_BASE", "megamcp-test/base:latest")
NOTES = Path(__file__).parent / "notes.py"


def docker(*words: str) -> str:
    """What the command prints. Raises CalledProcessError."""
    return subprocess.run(("docker", *words), check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="session")
def base_image() -> str:
    pytest.importorskip("docker", reason="the SDK for Docker is not installed")
    try:
        docker("image", "inspect", BASE)
    except FileNotFoundError:
        pytest.skip("there is no docker command; .ci/docker installs it")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no engine with the image {BASE}; .ci/docker makes it: {error.stderr.strip()}")
    return BASE


class Kept:
    """The runtime as a keeper has it, and who was told dead."""

    def __init__(self, state: Path) -> None:
        self.dead: list[Exited] = []
        self.state = state
        self.runtime = Containers(Folders(state), self.dead.append)

    def labelled(self) -> list[str]:
        """Containers and images of this keeper."""
        label = f"label=megamcp.keeper={self.runtime._keeper}"
        return (docker("ps", "-aq", "--filter", label) + docker("images", "-q", "--filter", label)).split()


@pytest_asyncio.fixture(loop_scope="session")
async def kept(base_image: str, tmp_path: Path) -> AsyncIterator[Kept]:
    (tmp_path / "name").write_text(f"test-{secrets.token_hex(4)}")
    kept = Kept(tmp_path)
    yield kept
    for image in kept.runtime.images():
        await kept.runtime.drop(image)
    await kept.runtime.aclose()
    assert kept.labelled() == []


@pytest.fixture
def spec(base_image: str, tmp_path: Path) -> Spec:
    """A program that answers a line with a line: see notes.py."""
    files = tmp_path / "files"
    files.mkdir()
    (files / "notes.py").write_text(NOTES.read_text())
    (files / "notes.txt").write_text("first\n")
    return Spec(
        kind=Kind.DOCKER,
        command=("python3", "-u", "notes.py"),
        image=base_image,
        files=str(files),
        content="notes",
    )
