"""What one tool server at a URL is shown: `dataplane.ports.Authority` over references and grants.

The hot path is `fields`: bytes that are kept until the server refuses them or their time is over. All else is off it,
for one request at a time in this process and, where a grant changes, for one process at a time. What a person decides
comes back elsewhere (`Authorities.finish`) and is found in the vault by the next request that is refused.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from megamcp import references
from megamcp.dataplane.http import field_lines
from megamcp.definitions import Grant as GrantKind
from megamcp.definitions import OAuthConfig, ServerConfig
from megamcp.errors import AuthorizationRequired, UpstreamError
from megamcp.oauth import tokens as oauth
from megamcp.oauth.discovery import Challenge, Discovery, Found, Issuer, same_issuer
from megamcp.oauth.fetch import Fetcher
from megamcp.oauth.tokens import Client, Refused, Tokens
from megamcp.oauth.vault import Consent, Grant, Locked, Place, Vault

log = logging.getLogger(__name__)

_TURN_S = 45.0
"""Deadline of all that is done about one refusal; below the 60 s after which PostgreSQL ends an idle transaction."""
_AGAIN_S = 10.0
_LEAVE_S = 10.0


class Credentials:
    """See the module's docstring. `base` is where people's browsers find the gateway."""

    def __init__(self, place: Place, config: ServerConfig, vault: Vault, base: str) -> None:
        self.place = place
        self._headers = {name: text for name, text in config.headers.items() if references.present(text)}
        self._fixed = any(name.lower() == "authorization" for name in config.headers)
        self._oauth = config.oauth or OAuthConfig()
        self._vault = vault
        self._fetcher = Fetcher(place.server, place.resource)
        self._discovery = Discovery(place.server, place.resource, self._fetcher, self._oauth.issuer)
        self._redirect = f"{base}/oauth/callback"
        self._document = self._oauth.client_metadata_url
        if self._document is None and base.startswith("https://"):
            self._document = f"{base}/oauth/client.json"
        self._turn = asyncio.Lock()
        self._line: bytes | None = None
        self._renew_at: float | None = None
        self._under_way: set[asyncio.Task[bytes]] = set()

    # ports.Authority

    async def fields(self) -> bytes:
        line = self._line
        if line is None or (self._renew_at is not None and time.time() >= self._renew_at):
            line = await self._to_its_end(self._current())
        return line

    async def challenged(self, sent: bytes, status: int, challenge: str | None) -> bytes | None:
        asked = Challenge.read(challenge)
        if status == 403 and asked.error != "insufficient_scope":
            return None
        return await self._to_its_end(self._answered(sent, status, asked, challenge or ""))

    async def _answered(self, sent: bytes, status: int, asked: Challenge, because: str) -> bytes:
        async with self._in_turn():
            if self._line is not None and self._line != sent:
                return self._line  # another request was quicker
            if self._fixed:
                return self._changed(sent)
            async with self._vault.locked(self.place) as locked:
                grant = await locked.grant()
                if grant.tokens is not None and self._with(grant.tokens) != sent:
                    outcome: Tokens | AuthorizationRequired = grant.tokens  # another process was
                else:
                    outcome = await self._settle(locked, grant, asked, because, step_up=status == 403)
            # What was kept stays kept, whoever has to do what next.
            if isinstance(outcome, AuthorizationRequired):
                raise outcome
            return self._adopt(outcome)

    async def forget(self) -> None:
        """The next request begins anew, as if nobody had ever consented; the gateway stays registered."""
        async with self._in_turn(), self._vault.locked(self.place) as locked:
            grant = await locked.grant()
            await locked.keep(Grant(issuer=grant.issuer, resource=grant.resource, client=grant.client))
            await locked.withdraw()
            self._adopt(None)

    # Static headers

    def _changed(self, sent: bytes) -> bytes:
        """The headers, if what they refer to has changed."""
        line = self._adopt(None)
        if line == sent:
            raise UpstreamError(
                f"Tool server {self.place.server!r} refuses the Authorization that its headers give.",
                code="tool_server_refuses",
                hint="See that the secret is the right one and is not expired; a file is read again by the next call.",
            )
        return line

    def _with(self, tokens: Tokens | None) -> bytes:
        where = f"servers.{self.place.server}.headers"
        lines = field_lines(references.resolve_all(self._headers, where).texts) if self._headers else b""
        return lines + (b"Authorization: Bearer %b\r\n" % tokens.access.encode() if tokens else b"")

    def _adopt(self, tokens: Tokens | None) -> bytes:
        self._line = self._with(tokens)
        self._renew_at = tokens.renew_at if tokens else None
        return self._line

    # Tokens

    async def _current(self) -> bytes:
        """The line as it is now: read for the first time, or renewed. After a failure the server may decide."""
        async with self._in_turn():
            return await self._read_or_renewed()

    async def _read_or_renewed(self) -> bytes:
        if self._fixed:
            return self._adopt(None)
        if self._line is None:
            line = self._adopt((await self._vault.grant(self.place)).tokens)
            if self._renew_at is None or time.time() < self._renew_at:
                return line
        elif self._renew_at is None or time.time() < self._renew_at:
            return self._line
        try:
            async with self._vault.locked(self.place) as locked:
                grant = await locked.grant()
                if grant.tokens is None or self._with(grant.tokens) != self._line:
                    return self._adopt(grant.tokens)
                if (newer := await self._renewed(grant)) is None:
                    self._renew_at = None
                else:
                    await locked.keep(_having(grant, newer))
                    self._adopt(newer)
        except Refused as refused:
            log.info("the token of %s can't be renewed: %s", self.place.server, refused.error)
            self._renew_at = None
        except UpstreamError as error:
            log.warning("%s", error.message)
            self._renew_at = time.time() + _AGAIN_S
        assert self._line is not None
        return self._line

    async def _renewed(self, grant: Grant) -> Tokens | None:
        """Newer tokens without asking anybody; None where there is no way to. Raises Refused, UpstreamError."""
        held, issuer = grant.tokens, grant.issuer
        client = (self._configured(issuer) if issuer else None) or grant.client
        if held is None or issuer is None or client is None:
            return None
        if self._oauth.grant is GrantKind.CLIENT_CREDENTIALS:
            return await oauth.by_credentials(self._fetcher, Found(issuer, grant.resource, ()), client, held.requested)
        if held.refresh is None:
            return None
        return await oauth.refresh(self._fetcher, issuer, client, held, grant.resource)

    async def _settle(
        self, locked: Locked, grant: Grant, challenge: Challenge, because: str, *, step_up: bool
    ) -> Tokens | AuthorizationRequired:
        """What is to be shown after a refusal, or who has to be asked for it. Raises UpstreamError."""
        held = grant.tokens
        if step_up and held is not None and set(challenge.scopes) <= set(held.requested):
            # It was asked for all that, and what came of it was not enough: asking again would go on for ever.
            raise UpstreamError(
                f"Tool server {self.place.server!r} finds the scopes of its token too few"
                f" ({' '.join(challenge.scopes)[:200] or 'it names none'}), and they were asked for already.",
                code="insufficient_scope",
                hint=f"`megamcp env authorize --again {self.place.environment} {self.place.server}` has them asked for"
                " once more; or the person who consents may not give them.",
            )
        waiting = await locked.asked()
        if waiting is not None and (waiting.because, waiting.redirect) == (because, self._redirect):
            return self._required(waiting.url)
        found = await self._discovery.find(challenge)
        scopes = self._scopes(found, challenge, held if step_up else None)
        try:
            client = await self._client(found, grant, scopes)
            same = grant.issuer is not None and same_issuer(grant.issuer.issuer, found.issuer.issuer)
            known = Grant(issuer=found.issuer, resource=found.resource, client=client)
            if self._oauth.grant is GrantKind.CLIENT_CREDENTIALS:
                newer = await oauth.by_credentials(self._fetcher, found, client, scopes)
                await locked.keep(_having(known, newer))
                return newer
            if same and held and held.refresh and not step_up and grant.client and grant.client.id == client.id:
                with contextlib.suppress(Refused):
                    newer = await oauth.refresh(self._fetcher, found.issuer, client, held, found.resource)
                    await locked.keep(_having(known, newer))
                    return newer
        except Refused as refused:
            raise self._discovery.failed(
                f"{found.issuer.issuer[:200]!r} refuses the gateway ({refused.error})"
            ) from None
        if not (step_up and same):  # a token with too few scopes is still good for the rest
            await locked.keep(known)
        return await self._ask(locked, found, client, scopes, because)

    async def _ask(
        self, locked: Locked, found: Found, client: Client, scopes: tuple[str, ...], because: str
    ) -> AuthorizationRequired:
        issuer = found.issuer
        if issuer.authorization_endpoint is None or "S256" not in (issuer.code_challenge_methods_supported or ()):
            raise self._discovery.failed(f"{issuer.issuer[:200]!r} offers no authorization by codes with PKCE (S256)")
        state = secrets.token_urlsafe(32)
        verifier, pkce = oauth.verifier_and_challenge()
        url = oauth.consent_url(
            issuer,
            client,
            redirect=self._redirect,
            state=state,
            challenge=pkce,
            resource=found.resource,
            scopes=scopes,
        )
        consent = Consent(
            url=url,
            verifier=verifier,
            redirect=self._redirect,
            issuer=issuer,
            client=client,
            resource=found.resource,
            scopes=scopes,
            because=because,
        )
        await locked.ask(state, consent)
        return self._required(url)

    def _required(self, url: str) -> AuthorizationRequired:
        told = f"Tool server {self.place.server!r} of environment {self.place.environment!r} wants a person's consent."
        return AuthorizationRequired.at(url, told, hashlib.sha256(url.encode()).hexdigest()[:32])

    def _scopes(self, found: Found, challenge: Challenge, held: Tokens | None) -> tuple[str, ...]:
        """Those that are asked for: what the server names, the environment's, and, to get more, those held already."""
        named = [*(held.requested if held else ()), *(challenge.scopes or found.scopes), *self._oauth.scopes]
        if (
            named
            and self._oauth.grant is GrantKind.AUTHORIZATION_CODE
            and "offline_access" in (found.issuer.scopes_supported or ())
        ):
            named.append("offline_access")
        return tuple(dict.fromkeys(named))

    # Clients

    def _configured(self, issuer: Issuer) -> Client | None:
        """The client that the environment names. Raises `Unprocessable` (`secret_missing`)."""
        own = self._oauth
        if own.client_id is None:
            return None
        texts = {"client_secret": own.client_secret or "", "private_key": own.private_key or ""}
        told = references.resolve_all(texts, f"servers.{self.place.server}.oauth").texts
        if own.private_key:
            key = told["private_key"]
            return Client(id=own.client_id, method="private_key_jwt", key=key, algorithm=own.algorithm)
        secret = told["client_secret"] or None
        return Client(id=own.client_id, secret=secret, method=oauth.auth_method(issuer, secret=secret is not None))

    async def _client(self, found: Found, grant: Grant, scopes: tuple[str, ...]) -> Client:
        """In the order of the specification: registered by hand, by a metadata document, by itself."""
        issuer = found.issuer
        if (configured := self._configured(issuer)) is not None:
            return configured
        if self._document is not None and issuer.client_id_metadata_document_supported:
            return Client(id=self._document)
        known = grant.client
        # What one authorization server has given is never shown to another.
        if (
            known
            and known.issuer
            and same_issuer(known.issuer, issuer.issuer)
            and known.redirect == self._redirect
            and set(scopes) <= set(known.scopes)
        ):
            return known
        if issuer.registration_endpoint is None:
            raise self._discovery.failed(
                f"{issuer.issuer[:200]!r} registers no clients by itself: register the gateway there, with the redirect"
                f" URI {self._redirect}, and give client_id and client_secret in [servers.{self.place.server}.oauth]"
            )
        return await oauth.register(self._fetcher, issuer, self._redirect, scopes)

    async def aclose(self) -> None:
        """Waits for what is under way."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=_LEAVE_S)
        for task in self._under_way:
            task.cancel()

    async def _to_its_end(self, work: Coroutine[Any, Any, bytes]) -> bytes:
        """Whoever waits for it may leave: an answer with newer tokens that nobody takes would end the grant."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def _over(self, task: "asyncio.Task[bytes]") -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # its waiter may have left

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_TURN_S), self._turn:
                yield
        except TimeoutError:
            raise self._discovery.failed(f"it took more than {_TURN_S:g} s") from None


def _having(grant: Grant, tokens: Tokens | None) -> Grant:
    return Grant(issuer=grant.issuer, resource=grant.resource, client=grant.client, tokens=tokens)
