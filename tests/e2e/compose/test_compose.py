"""`docker compose up` as a user runs it: a copy of the project, an `.env`, the images built from what is at hand here.

Base images and packages come from this machine (`.ci/docker`, a folder of wheels), by the build arguments that a user
without the public ones would set.
"""

import ast
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import asyncpg
import pytest
import pytest_asyncio

from megamcp.client import Client, Unavailable

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
BASE = os.environ.get("MEGAMCP_TEST_BASE", "megamcp-test/base:latest")
POSTGRES = "megamcp-test/postgres:latest"
COPIED = (".dockerignore", "Dockerfile", "LICENSE", "README.md", "compose.yaml", "pyproject.toml")
SHELF = {
    "environment.toml": """
name = "shelf"
[servers.shelf]
entry = "shelf_server:server"
[servers.shelf.state]
kind = "database"
schema = "schema.sql"
""",
    "schema.sql": "create table books (title text primary key); insert into books values ('Emma');",
    "shelf_server.py": """
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Server

server = Server("shelf")


@server.tool
async def count(db: AsyncConnection) -> int:
    return int((await db.execute(text("select count(*) from books"))).scalar_one())
""",
}
NOTES = {
    "environment.toml": """
name = "notes"
[servers.notes]
entry = "kept_notes:Notes"
[servers.notes.state]
kind = "process"
runtime = "fork"
""",
    "kept_notes.py": """
class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> list[str]:
        self.lines.append(line)
        return self.lines
""",
}
# This machine, as a container on the engine's own bridge sees it.
ASKED = """
import socket
route = next(line.split() for line in open("/proc/net/route") if line.split()[1] == "00000000")
print(socket.inet_ntoa(bytes.fromhex(route[2])[::-1]))
"""
FOLDERS = ("megamcp", "migrations", "sandboxes", "tool_servers")


def run(*words: str, cwd: Path | None = None) -> str:
    """What a command prints. Fails with what it said."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-3000:]}"
    return done.stdout


@dataclass(frozen=True, slots=True)
class Stack:
    """A project that is up."""

    folder: Path
    project: str
    url: str
    relay_port: int

    def compose(self, *words: str) -> str:
        return run("docker", "compose", *words, cwd=self.folder)

    def inside(self, number: int, code: str) -> str:
        return self.compose("exec", "-T", f"--index={number}", "gateway", "python", "-c", code)

    def left(self) -> dict[str, str]:
        """What the engine still has of the project."""
        label = f"--filter=label=com.docker.compose.project={self.project}"
        kinds = {"containers": ("ps", "-aq"), "volumes": ("volume", "ls", "-q"), "networks": ("network", "ls", "-q")}
        return {kind: run("docker", *words, label) for kind, words in kinds.items()}


@pytest.fixture(scope="module")
def base_image() -> str:
    try:
        run("docker", "image", "inspect", BASE)
        run("docker", "compose", "version")
    except FileNotFoundError:
        pytest.skip("there is no docker command; .ci/docker installs it")
    except AssertionError as error:
        pytest.skip(f"no engine with Compose and the image {BASE}; .ci/docker makes it: {error}")
    return BASE


def download(folder: Path, python: str) -> None:
    """Wheels of what the image will have, for its Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["docker"],
    ]
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
    run(*pip, "--dest", str(folder), "--only-binary=:all:", "--python-version", python, *wanted)


@contextmanager
def served(folder: Path) -> Iterator[dict[str, str]]:
    """A folder of wheels for builds, on the engine's bridge; pip's variables for it."""
    gateway = run("docker", "run", "--rm", BASE, "python3", "-c", ASKED).strip()
    handler = partial(_Quiet, directory=str(folder))
    try:
        server = ThreadingHTTPServer((gateway, 8699), handler)  # the same each time: layers are kept by it
    except OSError:
        server = ThreadingHTTPServer((gateway, 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {
            "BUILD_PIP_FIND_LINKS": f"http://{gateway}:{server.server_port}/",
            "BUILD_PIP_NO_INDEX": "1",
            "BUILD_PIP_TRUSTED_HOST": gateway,
        }
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def stack(base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("project")
    for name in COPIED:
        shutil.copy(ROOT / name, folder / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for environment, files in (("shelf", SHELF), ("notes", NOTES)):
        (folder / "environments" / environment).mkdir(parents=True)
        for name, text in files.items():
            (folder / "environments" / environment / name).write_text(text)
    wheels = tmp_path_factory.mktemp("wheels")
    version = "import sys; print('%d.%d' % sys.version_info[:2])"
    download(wheels, run("docker", "run", "--rm", base_image, "python3", "-c", version).strip())
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    project = f"megamcp-test-{secrets.token_hex(4)}"
    with served(wheels) as pip:
        arguments = [
            word for name, value in pip.items() for word in ("--build-arg", f"{name.removeprefix('BUILD_')}={value}")
        ]
        dockerfile = ("-f", str(HERE / "postgres.Dockerfile"), "--build-arg", f"BASE={base_image}")
        run("docker", "build", "--quiet", "--tag", POSTGRES, *dockerfile, *arguments, str(HERE))
        chosen = {
            **pip,
            "COMPOSE_PROJECT_NAME": project,
            "POSTGRES_PASSWORD": secrets.token_hex(16),
            "ENVIRONMENTS_DIR": "./environments",
            "MEGAMCP_ENVIRONMENTS": '["/environments/shelf", "/environments/notes"]',
            "PORT": str(ports[0]),
            "RELAY_PORT": str(ports[1]),
            "PYTHON_IMAGE": base_image,
            "FRONT_IMAGE": base_image,
            "POSTGRES_IMAGE": POSTGRES,
            "MEGAMCP_IMAGE": "megamcp-test/gateway:latest",
        }
        example = (ROOT / ".env.example").read_text()
        for name, value in chosen.items():
            line = re.compile(rf"^#?{name}=.*$", re.M)
            assert name == "COMPOSE_PROJECT_NAME" or line.search(example), f"{name} is not in .env.example"
            example = line.sub("", example) + f"\n{name}={value}"
        (folder / ".env").write_text(example)
        stack = Stack(folder, project, f"http://127.0.0.1:{ports[0]}", ports[1])
        try:
            stack.compose("build", "--quiet")
            stack.compose("up", "--detach", "--wait", "--wait-timeout", "180")
            yield stack
        finally:
            logs = subprocess.run(
                ("docker", "compose", "logs", "--tail=30"), cwd=folder, capture_output=True, text=True, check=False
            )
            sys.stdout.write(logs.stdout)  # pytest shows it where something failed
            stack.compose("--profile", "sandboxes", "down", "--volumes", "--timeout", "10")
    assert stack.left() == {"containers": "", "volumes": "", "networks": ""}


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.url) as client:
        yield client


async def test_the_clients_snippet_of_the_readme_works(stack: Stack) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (snippet,) = (block for block in blocks if "from megamcp.client import Client" in block)
    code = compile(
        snippet.replace("http://127.0.0.1:8600", stack.url), "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    )
    await eval(code, {"print": lambda *words: None})


async def test_nothing_runs_as_root_but_what_must(stack: Stack) -> None:
    assert stack.inside(1, "import os; print(os.getuid())").strip() == "10001"
    status = stack.inside(1, "print(open('/proc/self/status').read())")
    assert re.search(r"^CapBnd:\s+0+$", status, re.M)
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.M)
    assert "keeper" not in stack.compose("ps", "--services")


async def test_a_rollouts_dsn_leads_through_the_front_to_its_database(stack: Stack, client: Client) -> None:
    rollout = await client.open("shelf")
    assert (await rollout.call("count")).value == 1
    given = await rollout.dsn()
    assert (given.host, given.port) == ("127.0.0.1", stack.relay_port)
    connection = await asyncpg.connect(given.dsn)
    await connection.execute("insert into books values ('by any client')")
    await connection.close()
    assert (await rollout.call("count")).value == 2


async def test_the_keeper_of_a_profile_has_sandboxes_and_without_it_that_is_told(stack: Stack, client: Client) -> None:
    rollout = await client.open("notes")
    with pytest.raises(Unavailable) as caught:
        await rollout.call("add", line="one")
    assert caught.value.code == "sandboxes_unavailable"
    stack.compose("--profile", "sandboxes", "up", "--detach", "--wait", "keeper")
    assert (await rollout.call("add", line="one")).value == ["one"]
    point = await rollout.checkpoint()
    await rollout.call("add", line="two")
    (fork,) = await point.fork()
    assert (await fork.call("add", line="other")).value == ["one", "other"]
    await rollout.rollback(point)
    assert (await rollout.call("add", line="three")).value == ["one", "three"]


async def test_two_gateways_share_all_and_one_may_be_killed(stack: Stack, client: Client) -> None:
    stack.compose("up", "--detach", "--wait", "--no-recreate", "--scale", "gateway=2")
    rollouts = [await client.open("retail") for _ in range(12)]
    digests = [await rollout.digest() for rollout in rollouts]
    for rollout in rollouts:
        await rollout.call("find_customer", email="jasper.yilmaz@example.com")
        await rollout.call("verify_customer", customer_id="C1480", proof="postal_code", value="05404")
        await rollout.call("cancel_order", customer_id="C1480", order_id="W101948", reason="found_cheaper")
    given = (await (await client.open("shelf")).dsn()).dsn
    for number in (1, 2):
        # Each had some of the rollouts: a gateway starts a tool server when it is first called.
        assert "tool_servers.retail" in run("docker", "top", f"{stack.project}-gateway-{number}", "-o", "pid,args")
    run("docker", "kill", "--signal", "KILL", f"{stack.project}-gateway-1")
    for rollout, digest in zip(rollouts, digests, strict=True):
        found = await rollout.query("select count(*) from orders where status = 'cancelled' and id = 101948")
        assert found.rows == [[1]]
        assert await rollout.digest() != digest
        await rollout.call("find_customer", email="jasper.yilmaz@example.com")
    # A DSN is good at any gateway, whichever gave it out.
    connection = await asyncpg.connect(given)
    assert await connection.fetchval("select count(*) from books") == 1
    await connection.close()
