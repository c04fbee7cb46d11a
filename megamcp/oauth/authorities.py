"""The credentials of all tool servers of this process, and what comes back from people's browsers.

A consent may come back to any gateway process: all that it is held against lies in the vault.
"""

import asyncio
from collections.abc import Mapping

from megamcp.environments import LoadedEnvironment, LoadedServer
from megamcp.errors import BadRequest, UpstreamError
from megamcp.oauth import tokens as oauth
from megamcp.oauth.credentials import Credentials
from megamcp.oauth.fetch import Fetcher
from megamcp.oauth.tokens import Refused
from megamcp.oauth.vault import Grant, Place, Vault
from megamcp.settings import Settings
from megamcp.store import Store

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def base_url(settings: Settings) -> str:
    """Where people's browsers find the gateway."""
    if settings.public_url:
        return settings.public_url.rstrip("/")
    host = _ANYWHERE.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


class Authorities:
    """One `Credentials` for each server of each version of an environment; those of one name share their grants."""

    def __init__(self, store: Store, locks: Store, settings: Settings) -> None:
        self.base = base_url(settings)
        self._vault = Vault(store, locks, settings)
        self._known: dict[tuple[int, str], Credentials] = {}

    def of(self, environment: LoadedEnvironment, server: LoadedServer) -> Credentials:
        known = self._known.get((environment.id, server.name))
        if known is None:
            assert server.config.url is not None
            place = Place(environment.name, server.name, server.config.url)
            known = Credentials(place, server.config, self._vault, self.base)
            self._known[environment.id, server.name] = known
        return known

    async def aclose(self) -> None:
        """Waits for what is under way, so that no token gets lost."""
        await asyncio.gather(*(known.aclose() for known in self._known.values()))

    async def finish(self, query: Mapping[str, str]) -> Place:
        """Takes what a browser brought back, once. Raises BadRequest, UpstreamError."""
        taken = await self._vault.take(query.get("state", ""))
        if taken is None:
            raise BadRequest(
                "Nobody waits for this answer: it was given already, came too late, or was never asked for.",
                code="unknown_consent",
            )
        place, consent = taken
        # RFC 9207, texts as they are: the answer is that of the server that was asked.
        issuer, said = consent.issuer, query.get("iss")
        if said != issuer.issuer and (said is not None or issuer.authorization_response_iss_parameter_supported):
            raise BadRequest(
                "The answer does not come from the authorization server that was asked.", code="foreign_consent"
            )
        code = query.get("code")
        if "error" in query or not code:
            raise BadRequest(
                f"No consent was given for tool server {place.server!r} of environment {place.environment!r}.",
                code="consent_refused",
            )
        fetcher = Fetcher(place.server, place.resource)
        try:
            tokens = await oauth.exchange(
                fetcher,
                issuer,
                consent.client,
                code=code,
                verifier=consent.verifier,
                redirect=consent.redirect,
                resource=consent.resource,
                scopes=consent.scopes,
            )
        except Refused as refused:
            raise UpstreamError(
                f"The authorization server {issuer.issuer!r} gives no token for this consent ({refused.error}).",
                code="authorization_failed",
            ) from None
        async with self._vault.locked(place) as locked:
            await locked.keep(Grant(issuer=issuer, resource=consent.resource, client=consent.client, tokens=tokens))
        return place
