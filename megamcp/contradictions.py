"""What is wrong with a definition, in words for who wrote it: unknown keys, and fields that can't go together.

Only what the text alone shows, for all servers at once: what else would be found out at the first call, or never, since
a field that nothing reads looks like one that works. Looks at no file and no host. Versions that were loaded before are
not judged again.
"""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from megamcp import references
from megamcp.definitions import (
    DSN,
    DatabaseConfig,
    DocumentConfig,
    EnvironmentConfig,
    OAuthConfig,
    ProcessConfig,
    Runtime,
    SchemaConfig,
    ServerConfig,
    StateConfig,
)

_STATES: dict[str, type[BaseModel]] = {
    get_args(config.model_fields["kind"].annotation)[0]: config for config in get_args(get_args(StateConfig)[0])
}
_IMAGE = re.compile(
    r"([A-Za-z0-9.-]+(:\d+)?/)?[a-z0-9]+(([._]|__|-+|/)[a-z0-9]+)*(:\w[\w.-]{0,127})?(@[A-Za-z0-9+._-]+:[0-9a-fA-F]{32,})?"
)
_LIKE = 0.8
"""So like a known key is a typing error. No field that MCP clients have in an `mcp.json` is as like to one of ours."""


def contradictions(servers: Mapping[str, ServerConfig]) -> list[dict[str, str]]:
    """{where, problem} of each."""
    return [
        {"where": f"servers.{name}", "problem": problem}
        for name, server in servers.items()
        for problem in _contradictions(server)
    ]


def _contradictions(server: ServerConfig) -> Iterator[str]:
    state = server.state
    if server.headers and not server.url:
        yield "headers belong to a url; what a program is to be told goes into env"
    if server.transport and not server.url:
        yield "transport belongs to a url; programs are spoken to by stdio"
    if server.env and server.url:
        yield "env and url: the variables of a program that runs elsewhere can't be set here; take env out"
    if server.oauth and not server.url:
        yield "oauth belongs to a url: programs that run here are given secrets by env"
    if server.oauth and any(name.lower() == "authorization" for name in server.headers):
        yield "oauth and headers.Authorization: the server takes one of them; take the other out"
    for name, texts in (("url", [server.url]), ("command", [server.command]), ("args", server.args)):
        if any(references.present(text) for text in texts if text is not None):
            yield f"a secret's reference in {name}: those are read in headers, env and oauth only"
    if server.restart != "never" and not isinstance(state, DatabaseConfig):
        yield f"restart and state of kind {state.kind}: restart belongs to state of kind database; take it out"
    if not isinstance(state, DatabaseConfig) and any(DSN in text for text in (*server.args, *server.env.values())):
        yield f"{DSN} in args or env, but only state of kind database has a DSN"
    if isinstance(state, SchemaConfig) and "source_schema" in state.model_fields_set and state.dump is None:
        yield "state.source_schema without state.dump: it says what is taken of a dump; take it out"
    if isinstance(state, DocumentConfig) and server.entry and (state.load or state.dump):
        yield (
            "entry and state.load or state.dump: those are tools of a command; a class has methods of these names, or"
            " its attributes are kept"
        )
    if isinstance(state, ProcessConfig):
        yield from _of_a_sandbox(server, state)


def _of_a_sandbox(server: ServerConfig, state: ProcessConfig) -> Iterator[str]:
    image = state.image
    folder = image is not None and image.startswith("/")
    if state.workdir.strip("/") == "" or ".." in state.workdir.split("/"):
        yield f"state.workdir is {state.workdir}: it must be a folder below /, without .. in its path"
    match state.runtime:
        case Runtime.FORK if server.command:
            yield "command and state.runtime = fork: the fork server runs an entry; take criu, docker or auto"
        case Runtime.FORK | Runtime.AUTO if server.entry and image is not None:
            yield (
                f"entry, state.image and state.runtime = {state.runtime}: an entry runs on the gateway's own Python,"
                " not in an image; take the image out, or give a command"
            )
        case Runtime.DOCKER if image is None:
            yield 'state.runtime = docker and no state.image: name one, such as image = "python:3.13-slim"'
        case Runtime.DOCKER if folder:
            yield f"state.runtime = docker and state.image = {image}: Docker has images by name; criu takes a folder"
        case Runtime.CRIU if image is not None and not folder:
            yield (
                f"state.runtime = criu and state.image = {image}: criu takes the absolute path of a folder with a root"
                " file system; images by name are Docker's"
            )
    if image is not None and not folder and not _IMAGE.fullmatch(image):
        yield (
            f"state.image = {image!r} is no name of an image: those are lower case, such as"
            " registry.example.org/shop/notes:1.2; a folder with a root file system begins with /"
        )


def problem_of(error: Mapping[str, Any]) -> dict[str, str]:
    """{where, problem} of one of pydantic's errors."""
    place = tuple(error["loc"])
    match place:
        case ("servers", _, "state", kind, *_) if kind in _STATES:
            model: type[BaseModel] = _STATES[kind]
            place = (*place[:3], *place[4:])  # the kind is no key
        case ("servers", _, "oauth", _, *_):
            model = OAuthConfig
        case ("servers", _, _, *_):
            model = ServerConfig
        case _:
            model = EnvironmentConfig
    match error["type"]:
        case "extra_forbidden":
            problem = unknown(str(place[-1]), [field.alias or name for name, field in model.model_fields.items()])
            place = place[:-1]
        case "union_tag_not_found":
            problem = f"say its kind: {', '.join(_STATES)}"
        case "union_tag_invalid":
            problem = unknown(str(error["ctx"]["tag"]), _STATES, "kind")
        case _:
            problem = str(error["msg"]).removeprefix("Value error, ")
    return {"where": ".".join(map(str, place)), "problem": problem}


def unknown(name: str, known: Collection[str], what: str = "key") -> str:
    """What there is instead."""
    near = difflib.get_close_matches(name, known, 1)
    return f"there is no {what} {name!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    )


def of_other_programs(server: str, said: Mapping[str, Any], known: Collection[str]) -> Iterator[dict[str, str]]:
    """{where, problem} of the keys of a server in an `mcp.json` that are no other programs', but misspelt."""
    for name in said:
        if name == "entry":
            yield {"where": f"mcpServers.{server}", "problem": "an entry needs an environment.toml"}
        elif name not in known and difflib.get_close_matches(name, known, 1, _LIKE):
            yield {"where": f"mcpServers.{server}", "problem": unknown(name, known)}
