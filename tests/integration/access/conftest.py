"""Two gateways on one database that want keys, and an issuer of tokens beside them."""

import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from pydantic import SecretStr

from megamcp.testing import Gateway, running_gateway
from tests.integration.conftest import copy_of
from tests.integration.rest import Rest

ADMIN = "the-first-admin"


@dataclass(slots=True)
class Issuer:
    """Signs tokens; its JWKS is what `keys` holds at the time."""

    url: str
    keys: dict[str, Any] = field(default_factory=dict)
    asked: int = 0

    def add(self, kid: str, algorithm: str = "ES256") -> None:
        match algorithm:
            case "ES256":
                self.keys[kid] = (algorithm, ec.generate_private_key(ec.SECP256R1()))
            case "EdDSA":
                self.keys[kid] = (algorithm, ed25519.Ed25519PrivateKey.generate())
            case _:
                self.keys[kid] = (algorithm, rsa.generate_private_key(65537, 2048))

    @property
    def jwks(self) -> dict[str, Any]:
        shown = []
        for kid, (algorithm, key) in self.keys.items():
            public = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
            shown.append({**public, "kid": kid, "use": "sig"})
        return {"keys": shown}

    def token(self, kid: str, claims: Mapping[str, Any]) -> str:
        algorithm, key = self.keys[kid]
        times = {"iss": self.url, "exp": time.time() + 300, "sub": "somebody"}
        return jwt.encode({**times, **claims}, key, algorithm, headers={"kid": kid})


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.asked += 1
            body = json.dumps(made.jwks).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Issuer(f"http://127.0.0.1:{server.server_address[1]}")
    for kid, algorithm in (("one", "ES256"), ("two", "RS256"), ("three", "EdDSA")):
        made.add(kid, algorithm)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass(frozen=True, slots=True)
class Guarded:
    """Two gateways: `strict` wants keys of agents too and takes tokens, `open` takes a rollout's URL for its key."""

    strict: Gateway
    open: Gateway
    issuer: Issuer
    audit: Path
    clients: list[httpx.AsyncClient] = field(default_factory=list)

    def rest(self, key: str | None, *, strict: bool = True) -> Rest:
        """Requests with this key."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        url = (self.strict if strict else self.open).url
        self.clients.append(httpx.AsyncClient(base_url=url, headers=headers, timeout=60))
        return Rest(self.clients[-1])

    async def key(self, scope: str, tenant: str = "default", **more: Any) -> str:
        """A new key's text."""
        body = {"name": f"{scope} of {tenant}", "scope": scope, "tenant": tenant, **more}
        made = await self.rest(ADMIN).done("POST", "/v1/keys", body)
        secret: str = made["secret"]
        return secret


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(
    postgres_dsn: str, ledger_template: str, issuer: Issuer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Guarded]:
    audit = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    key = SecretStr(ADMIN)
    async with (
        copy_of(postgres_dsn, ledger_template, f"mm_guarded_{secrets.token_hex(4)}") as dsn,
        running_gateway(
            dsn,
            api_key=key,
            agent_keys=True,
            jwt_issuer=issuer.url,
            audit_log=audit,
            reap_interval_s=3600,
        ) as strict,
        running_gateway(
            dsn, api_key=key, reap_interval_s=3600, allowed_hosts=["gateway.example"], max_result_bytes=200_000
        ) as opened,
    ):
        made = Guarded(strict, opened, issuer, audit)
        yield made
        for client in made.clients:
            await client.aclose()
