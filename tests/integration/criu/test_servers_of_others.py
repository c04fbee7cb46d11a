"""MCP servers from npm and PyPI, as they are, in sandboxes: what they hold in memory, files and SQLite forks."""

import asyncio
import itertools
import json
import os
from typing import Any

import pytest

from sandboxes.types import Kind, Limits, SandboxError, Spec
from tests.integration.criu.conftest import Host, Talk

pytestmark = [pytest.mark.criu, pytest.mark.npm, pytest.mark.timeout(400)]


class Conversation:
    """MCP over a sandbox's pipes."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.numbers = itertools.count(1000)
        self.rest = b""

    async def ask(self, method: str, **params: Any) -> Any:
        number = next(self.numbers)
        self.say({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        async with asyncio.timeout(30):
            while True:
                told = json.loads(await asyncio.to_thread(self.line))
                if told.get("id") == number and "method" not in told:
                    assert "result" in told, told
                    return told["result"]
                if "id" in told:  # a question of the server's
                    self.say({"jsonrpc": "2.0", "id": told["id"], "result": {"roots": []}})

    def say(self, message: Any) -> None:
        os.write(self.talk.pipes.stdin, json.dumps(message).encode() + b"\n")

    def line(self) -> bytes:
        while b"\n" not in self.rest:
            more = os.read(self.talk.pipes.stdout, 1 << 16)
            if not more:
                raise EOFError(os.read(self.talk.pipes.stderr, 1 << 16).decode())
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    async def call(self, tool: str, **arguments: Any) -> str:
        told = await self.ask("tools/call", name=tool, arguments=arguments)
        assert not told.get("isError"), told
        return "".join(part.get("text", "") for part in told["content"])


def spec(*command: str) -> Spec:
    return Spec(kind=Kind.CRIU, command=command, limits=Limits(memory=2 << 30))


async def begin(host: Host, spec: Spec, name: str) -> Conversation:
    talk = Conversation(await host.start(spec, name))
    await talk.ask(
        "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "test", "version": "1"}
    )
    talk.say({"jsonrpc": "2.0", "method": "notifications/initialized"})
    await talk.ask("tools/list")
    return talk


async def again(host: Host, spec: Spec, name: str, image: str) -> Conversation:
    """The conversation goes on: nothing is initialized again."""
    return Conversation(await host.start(spec, name, image))


async def frozen(host: Host, name: str, image: str) -> None:
    """Servers that say something by themselves are asked again."""
    for _ in range(20):
        try:
            await host.client.freeze(name, image)
            return
        except SandboxError as error:
            if error.code != "busy":
                raise
            await asyncio.sleep(0.05)
    raise AssertionError("never quiet")


async def test_server_memory(host: Host) -> None:
    made = spec("npx", "-y", "@modelcontextprotocol/server-memory")
    made = Spec(kind=Kind.CRIU, command=made.command, environ={"MEMORY_FILE_PATH": "/workspace/memory.json"})
    first = await begin(host, made, "memory-1")
    ada = [{"name": "Ada", "entityType": "person", "observations": ["writes programs"]}]
    await first.call("create_entities", entities=ada)
    await frozen(host, "memory-1", "memory-image")
    await first.call("delete_entities", entityNames=["Ada"])
    second = await again(host, made, "memory-2", "memory-image")
    assert "writes programs" in await second.call("read_graph")
    assert "writes programs" not in await first.call("read_graph")
    changes = await host.client.diff(made, "memory-image", "memory-1")
    assert [(change.path, change.change) for change in changes] == [("memory.json", "changed")]


async def test_server_filesystem(host: Host) -> None:
    made = spec("npx", "-y", "@modelcontextprotocol/server-filesystem", "/workspace")
    first = await begin(host, made, "files-1")
    await first.call("write_file", path="/workspace/a.txt", content="one\n")
    await frozen(host, "files-1", "files-image")
    digest = await host.client.digest(made, "files-image")
    await first.call("write_file", path="/workspace/a.txt", content="two\n")
    changes = await host.client.diff(made, "files-image", "files-1")
    assert [change.text for change in changes] == ["--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-one\n+two\n"]
    second = await again(host, made, "files-2", "files-image")
    assert await second.call("read_text_file", path="/workspace/a.txt") == "one\n"
    await first.call("write_file", path="/workspace/a.txt", content="one\n")
    assert await host.client.digest(made, "files-1") == digest


async def test_server_everything(host: Host) -> None:
    made = spec("npx", "-y", "@modelcontextprotocol/server-everything")
    first = await begin(host, made, "every-1")
    assert "Echo: hello" in await first.call("echo", message="hello")
    await frozen(host, "every-1", "every-image")
    talks = await asyncio.gather(*(again(host, made, f"every-{n}", "every-image") for n in range(2, 6)))
    told = await asyncio.gather(*(talk.call("echo", message=f"{n}") for n, talk in enumerate(talks)))
    assert told == [f"Echo: {n}" for n in range(4)]


async def test_mcp_server_sqlite(host: Host) -> None:
    made = spec("uvx", "--with", "mcp<2", "mcp-server-sqlite", "--db-path", "/workspace/test.db")
    first = await begin(host, made, "sqlite-1")
    await first.call("create_table", query="create table notes (text text)")
    await first.call("write_query", query="insert into notes values ('one')")
    await first.call("append_insight", insight="the first insight")  # in memory only
    await frozen(host, "sqlite-1", "sqlite-image")
    await first.call("write_query", query="delete from notes")
    second = await again(host, made, "sqlite-2", "sqlite-image")
    assert "one" in await second.call("read_query", query="select * from notes")
    memo = await second.ask("resources/read", uri="memo://insights")
    assert "the first insight" in memo["contents"][0]["text"]
    assert "one" not in await first.call("read_query", query="select * from notes")


async def test_mcp_server_git(host: Host) -> None:
    folder = host.folder / "repository"
    process = await asyncio.create_subprocess_exec("git", "init", "--quiet", "--initial-branch=main", str(folder))
    assert await process.wait() == 0
    (folder / "README").write_text("one\n")
    who = {f"GIT_{role}_{what}": "ada@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    made = Spec(
        kind=Kind.CRIU, command=("uvx", "mcp-server-git"), environ=who, files=str(folder), content="a repository"
    )
    first = await begin(host, made, "git-1")
    here = {"repo_path": "/workspace"}
    await first.call("git_add", files=["README"], **here)
    await first.call("git_commit", message="the first", **here)
    await frozen(host, "git-1", "git-image")
    await first.call("git_create_branch", branch_name="aside", **here)
    await first.call("git_checkout", branch_name="aside", **here)
    second = await again(host, made, "git-2", "git-image")
    assert "the first" in await second.call("git_log", **here)
    assert "On branch main" in await second.call("git_status", **here)
    assert "On branch aside" in await first.call("git_status", **here)
    changes = await host.client.diff(made, "git-image", "git-1")
    assert ".git/refs/heads/aside" in {change.path for change in changes if change.change == "added"}
