"""A tool server that wants authorization, and its authorization server: both on the official SDK, with all in memory.

The person who is asked consents at once. What the tests need to know or to change is an attribute.
"""

import asyncio
import contextlib
import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    AuthorizationParams,
    OAuthAuthorizationServerProvider,
    RefreshToken,
    construct_redirect_uri,
)
from mcp.server.auth.settings import AuthSettings, ClientRegistrationOptions
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from pydantic import AnyHttpUrl
from starlette.types import Message, Receive, Scope, Send

SCOPES = ["read", "write"]


@dataclass
class Issuer(OAuthAuthorizationServerProvider[AuthorizationCode, RefreshToken, AccessToken]):
    """The authorization server."""

    consents: bool = True
    lifetime: int = 3600
    grants: set[str] = field(default_factory=lambda: set(SCOPES))
    clients: dict[str, OAuthClientInformationFull] = field(default_factory=dict)
    codes: dict[str, AuthorizationCode] = field(default_factory=dict)
    access: dict[str, AccessToken] = field(default_factory=dict)
    refresh: dict[str, RefreshToken] = field(default_factory=dict)
    shown: int = 0
    """How often a refresh token was shown, also one that was no good any more."""
    refreshed: int = 0
    refreshing: asyncio.Event = field(default_factory=asyncio.Event)
    may_refresh: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[list[str]] = field(default_factory=list)
    """The scopes of each consent that was asked for."""
    made: list[str] = field(default_factory=list)
    """Every code, token and client secret that was ever given."""

    def __post_init__(self) -> None:
        self.may_refresh.set()

    def _new(self, prefix: str) -> str:
        self.made.append(f"{prefix}-{secrets.token_hex(16)}")
        return self.made[-1]

    async def get_client(self, client_id: str) -> OAuthClientInformationFull | None:
        return self.clients.get(client_id)

    async def register_client(self, client_info: OAuthClientInformationFull) -> None:
        self.clients[client_info.client_id] = client_info
        if client_info.client_secret:
            self.made.append(client_info.client_secret)

    async def authorize(self, client: OAuthClientInformationFull, params: AuthorizationParams) -> str:
        self.asked.append(params.scopes or [])
        if not self.consents:
            return construct_redirect_uri(str(params.redirect_uri), error="access_denied", state=params.state)
        code = self._new("code")
        self.codes[code] = AuthorizationCode(
            code=code,
            scopes=[scope for scope in params.scopes or [] if scope in self.grants],
            expires_at=time.time() + 60,
            client_id=client.client_id,
            code_challenge=params.code_challenge,
            redirect_uri=params.redirect_uri,
            redirect_uri_provided_explicitly=params.redirect_uri_provided_explicitly,
            resource=params.resource,
        )
        return construct_redirect_uri(str(params.redirect_uri), code=code, state=params.state)

    async def load_authorization_code(self, client: Any, authorization_code: str) -> AuthorizationCode | None:
        return self.codes.get(authorization_code)

    async def exchange_authorization_code(self, client: Any, authorization_code: AuthorizationCode) -> OAuthToken:
        del self.codes[authorization_code.code]
        return self._tokens(client.client_id, authorization_code.scopes, authorization_code.resource)

    async def load_refresh_token(self, client: Any, refresh_token: str) -> RefreshToken | None:
        self.shown += 1
        return self.refresh.get(refresh_token)

    async def exchange_refresh_token(self, client: Any, refresh_token: RefreshToken, scopes: list[str]) -> OAuthToken:
        self.refreshed += 1
        del self.refresh[refresh_token.token]  # rotated: the second who shows it is refused
        self.refreshing.set()
        await self.may_refresh.wait()
        return self._tokens(client.client_id, refresh_token.scopes, refresh_token.resource)

    async def load_access_token(self, token: str) -> AccessToken | None:
        return self.access.get(token)

    async def revoke_token(self, token: AccessToken | RefreshToken) -> None:
        self.access.pop(token.token, None)
        self.refresh.pop(token.token, None)

    def _tokens(self, client: str, scopes: list[str], resource: str | None) -> OAuthToken:
        access, refresh = self._new("access"), self._new("refresh")
        # Good for longer than is said: what the gateway makes of that is seen in `refreshed`.
        self.access[access] = AccessToken(token=access, client_id=client, scopes=scopes, resource=resource)
        self.refresh[refresh] = RefreshToken(token=refresh, client_id=client, scopes=scopes, resource=resource)
        return OAuthToken(
            access_token=access, refresh_token=refresh, expires_in=self.lifetime, scope=" ".join(scopes) or None
        )


class Guarded:
    """The ASGI application of both."""

    def __init__(self, origin: str) -> None:
        self.word: str | None = None
        """What is wanted in place of a token of the issuer's."""
        self.issuer = Issuer()
        self.url = f"{origin}/mcp"
        self._origin = origin
        self.ran: list[str] = []
        server = MCPServer(
            "guarded",
            auth_server_provider=self.issuer,
            auth=AuthSettings(
                issuer_url=AnyHttpUrl(origin),
                resource_server_url=AnyHttpUrl(self.url),
                validate_token_resource=True,
                required_scopes=["read"],
                client_registration_options=ClientRegistrationOptions(enabled=True, valid_scopes=SCOPES),
            ),
        )

        @server.tool()
        async def look() -> str:
            """Wants the scope read."""
            self.ran.append("look")
            return "seen"

        @server.tool()
        async def change() -> str:
            """Wants the scope write."""
            self.ran.append("change")
            return "changed"

        security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        self._app = server.streamable_http_app(transport_security=security)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/mcp" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode()
        if self.word is not None and authorization == f"Bearer {self.word}":
            known = AccessToken(token=self.word, client_id="c", scopes=SCOPES, resource=self.url)
            self.issuer.access[self.word] = known
        if self._lacks_write(body, authorization):
            metadata = f"{self._origin}/.well-known/oauth-protected-resource/mcp"
            told = f'Bearer error="insufficient_scope", scope="write", resource_metadata="{metadata}"'
            headers = [(b"www-authenticate", told.encode()), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        pending: list[Message] = [{"type": "http.request", "body": body}]

        async def again() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, again, send)

    def _lacks_write(self, body: bytes, authorization: str) -> bool:
        with contextlib.suppress(ValueError):
            message = json.loads(body)
            if message.get("method") == "tools/call" and message["params"]["name"] == "change":
                token = self.issuer.access.get(authorization.removeprefix("Bearer "))
                return token is not None and "write" not in token.scopes
        return False
