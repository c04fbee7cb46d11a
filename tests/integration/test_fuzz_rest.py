"""Whatever is sent to the control plane, it answers with a document of the documented shape, and never with a 5xx.

Requests are drawn from `/openapi.json` itself: valid bodies by their schema, bodies with one thing wrong, and junk. The
budget is fixed by examples; `FUZZ_SECONDS` draws for longer.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import pytest_asyncio

from tests.integration.promises.world import World
from tests.integration.rest import Rest, problem

BUDGET_S = float(os.environ.get("FUZZ_SECONDS", "6"))
NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**40, 1.5, -0.0, 1e308, "", " ", "\0", "a\0b", "head",
    "base", "ledger", "retail", "größe 😀", "\u202e", "x" * 5000, "'; drop table item; --", "%00", "../../etc/passwd",
    "{}", [], [[]], {}, {"a": {"b": [None]}}, {"\0": 1}, "2026-01-01T00:00:00Z~x", "inherit", "fresh", "NaN",
    "select 1", "select 1/0",
]  # fmt: skip
ALLOWED_5XX = {(504, "query_timeout"), (504, "deadline_exceeded")}


@pytest_asyncio.fixture(loop_scope="session")
async def rest(world: World) -> AsyncIterator[Rest]:
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as http:
        yield Rest(http)


class Dice:
    """Draws values of JSON schemas, some of them on purpose wrong."""

    def __init__(self, seed: int, document: dict[str, Any], known: dict[str, list[str]]) -> None:
        self.random = random.Random(seed)
        self._document = document
        self._known = known

    def value(self, schema: dict[str, Any], name: str = "", depth: int = 0) -> Any:
        if self.random.random() < 0.08 or depth > 5:
            return self.random.choice(NASTY)
        if reference := schema.get("$ref"):
            return self.value(self._document["components"]["schemas"][reference.split("/")[-1]], name, depth + 1)
        if options := schema.get("anyOf"):
            return self.value(self.random.choice(options), name, depth + 1)
        if name in self._known and self.random.random() < 0.8:
            return self.random.choice(self._known[name])
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                return [self.value(schema.get("items", {}), "", depth + 1) for _ in range(self.random.randrange(3))]
            case "integer":
                return self.random.choice([1, 2, 3, self.random.randrange(-5, 2**64)])
            case "number":
                return self.random.choice([1, 0.5, 60, self.random.uniform(-1e9, 1e9)])
            case "boolean":
                return self.random.random() < 0.5
            case "null":
                return None
            case "string":
                return self.random.choice(["x", "ledger", "items", "put", "head", "base", "select * from item"])
        return self.random.choice(NASTY)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        required = set(schema.get("required", []))
        made = {
            key: self.value(each, key, depth + 1)
            for key, each in schema.get("properties", {}).items()
            if (key in required and self.random.random() < 0.97) or self.random.random() < 0.5
        }
        if self.random.random() < 0.05:
            made[str(self.random.choice(NASTY))[:50]] = self.random.choice(NASTY)
        return made

    def path(self, template: str, parameters: list[dict[str, Any]]) -> str:
        for parameter in parameters:
            if parameter["in"] == "path":
                drawn = str(self.value(parameter["schema"], parameter["name"]))
                template = template.replace(f"{{{parameter['name']}}}", quote(drawn, safe="") or "x")
        return template

    def query(self, parameters: list[dict[str, Any]]) -> dict[str, str]:
        return {
            parameter["name"]: str(self.value(parameter["schema"], parameter["name"]))[:2000]
            for parameter in parameters
            if parameter["in"] == "query" and self.random.random() < 0.5
        }

    def mangled(self, body: bytes) -> bytes:
        """The body with a byte changed, cut or doubled."""
        at = self.random.randrange(len(body) + 1)
        return self.random.choice(
            [body[:at], body[:at] + bytes([self.random.randrange(256)]) + body[at + 1 :], body[:at] + body, body[at:]]
        )


def known_ids(dice_seed: list[str], points: list[str]) -> dict[str, list[str]]:
    return {
        "rollout": [*dice_seed, "ro_nobody"],
        "checkpoint": [*points, "cp_nobody"],
        "environment": ["ledger", "nowhere"],
        "name": ["ledger", "reward"],
        "tool": ["items", "put", "increment", "draw", "nothing"],
        "sql": ["select count(*) from item", "select * from account", "select 1/0", "delete from item"],
        "path": ["/nonexistent", "tests"],
        "count": [1, 2],  # type: ignore[list-item]
        "at": ["head", "base", *points],
        "from": ["head", "base", *points],
        "to": ["head", "base", *points],
        "seed": ["inherit", "fresh"],
    }


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [int(os.environ.get("FUZZ_SEED", "7"))])
async def test_no_request_is_answered_with_a_failure_of_the_gateway(rest: Rest, seed: int) -> None:
    document = await rest.done("GET", "/openapi.json")
    rollouts = [await rest.open() for _ in range(3)]
    points = [(await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints"))["id"] for rollout in rollouts]
    witness = await rest.open()
    await rest.call(witness, "put", key="mine", value="1")
    digest = await rest.digest(witness)
    dice = Dice(seed, document, known_ids(rollouts, points))
    operations = [
        (m.upper(), p, o) for p, ms in document["paths"].items() for m, o in ms.items() if p.startswith("/v1")
    ]
    seen: dict[int, int] = {}
    end = time.monotonic() + BUDGET_S
    while time.monotonic() < end:
        batch = [request(rest, dice, *dice.random.choice(operations)) for _ in range(6)]
        for told, answer in await asyncio.gather(*batch):
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            check(told, answer)
    assert sum(seen.values()) > 100
    assert {200, 201, 400, 404, 422} <= set(seen), seen
    assert await rest.digest(witness) == digest
    assert await rest.items(witness) == {"mine": "1"}


async def request(
    rest: Rest, dice: Dice, method: str, template: str, operation: dict[str, Any]
) -> tuple[str, httpx.Response]:
    parameters = operation.get("parameters", [])
    path, query = dice.path(template, parameters), dice.query(parameters)
    body = b""
    if content := operation.get("requestBody"):
        schema = content["content"]["application/json"]["schema"]
        body = json.dumps(dice.value(schema)).encode()
        if dice.random.random() < 0.1:
            body = dice.mangled(body)
    answer = await rest.http.request(
        method, path, params=query, content=body, headers={"content-type": "application/json"} if body else {}
    )
    return f"{method} {path} {query} {body[:500]!r}", answer


def check(told: str, answer: httpx.Response) -> None:
    if answer.is_success:
        return
    if answer.status_code in (307, 405):  # an id with a slash in it makes another path
        return
    document = answer.json()
    assert answer.status_code < 500 or (answer.status_code, document["code"]) in ALLOWED_5XX, (told, answer.text)
    problem(answer, answer.status_code, document["code"])
