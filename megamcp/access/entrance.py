"""The front door: what every request passes before either room, and what each route of the control plane asks again.

Host first, then who it is; at a route of the control plane, its scope and whose things it names. Where no keys are
wanted (none is set: loopback only) it costs a look at one header.
"""

import hashlib
import hmac
import ipaddress
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi import Request
from starlette.types import Scope as Asgi

from megamcp.access.audit import Audit
from megamcp.access.keys import PREFIX, Keys
from megamcp.access.principal import CALLER, DEFAULT_TENANT, SCOPE_PREFIX, Principal, Scope, demand_sight
from megamcp.access.quotas import Meters
from megamcp.access.rights import MCP, right
from megamcp.dataplane.asgi import bearer, origin_allowed
from megamcp.demands import no_checkpoint, no_rollout
from megamcp.errors import Forbidden, MegaMCPError, Unauthorized
from megamcp.oauth.authorities import base_url
from megamcp.settings import Settings
from megamcp.store import Store

if TYPE_CHECKING:
    from megamcp.access.tokens import Tokens

METADATA = "/.well-known/oauth-protected-resource"
BOOTSTRAP = "bootstrap"
VISIT = "megamcp.visit"
"""Where a request's `Visit` lies in its ASGI scope."""
_TENANT = "select tenant from megamcp.rollouts where id = $1"
_TENANT_OF_CHECKPOINT = """select r.tenant, c.rollout from megamcp.checkpoints c
    join megamcp.rollouts r on r.id = c.rollout where c.id = $1"""
_REMEMBERED = 100_000
_MOST_BYTES = 16 * 1024
_POINTS = ("from", "to", "at")
_WHOLE = ("base", "head")


@dataclass(slots=True)
class Visit:
    """A request to the control plane on its way."""

    principal: Principal | None
    deed: str | None = None
    target: str | None = None
    calling: bool = False
    """It is a tool call that counts against a quota: `Meters.end_call` has to follow."""


class Entrance:
    """Lets requests in, as somebody."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.keys = Keys(store)
        self.tokens = _tokens(settings)
        self.meters = Meters()
        self.wanted = keys_wanted(settings)
        self.audit = Audit(settings.audit_log, wanted=self.wanted)
        self.base = base_url(settings)
        self._store = store
        self._agent_keys = settings.agent_keys and self.wanted
        key = settings.api_key
        self._bootstrap = None if key is None else hashlib.sha256(key.get_secret_value().encode()).digest()
        self._origins = tuple(settings.allowed_origins)
        self._hosts = None if "*" in settings.allowed_hosts else _own_hosts(settings)
        if self.wanted and not settings.allowed_hosts:
            self._hosts = None  # a page that calls itself the gateway has no key to show
        self._tenants: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def check_host(self, scope: Asgi) -> None:
        """Raises `Forbidden` for a name that isn't the gateway's: a web page's, whose DNS says that it is here."""
        if self._hosts is None:
            return
        for name, value in scope["headers"]:
            if name == b"host" and not host_allowed(value, self._hosts):
                raise Forbidden("This gateway doesn't go by the Host of the request.", code="host_refused")

    def check_origin(self, scope: Asgi) -> None:
        """For the control plane; the data plane has its own. Raises `Forbidden` for another's web page."""
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if origin is None or origin_allowed(origin, self._origins):
            return
        if origin.partition(b"://")[2] != headers.get(b"host"):  # the gateway's own pages are at its own name
            raise Forbidden("This Origin may not use the gateway.", code="origin_refused")

    async def enter(self, scope: Asgi, *, agents: bool) -> Principal | None:
        """Who a request comes from; None for whom no key is asked of. Raises `Unauthorized`, `Forbidden`."""
        if not self.wanted:
            return None
        token = shown(scope)
        path: str = scope["path"]
        if agents and not self._agent_keys and not path.startswith("/e/") and not self._is_ours(token):
            return None  # the URL is what lets in; a key that is shown all the same counts, and has to be good
        if token is None:
            raise self._challenged(Unauthorized("This wants a key, and none was shown."), path)
        try:
            principal = await self._identified(token)
            if principal.path is not None and principal.path != path.rstrip("/"):
                raise Unauthorized("The token is for another path of this gateway.", code="invalid_token")
            if agents and principal.scope not in MCP.scopes:
                raise _not_for(principal)
        except (Unauthorized, Forbidden) as error:
            code = "insufficient_scope" if error.status == 403 else "invalid_token"
            raise self._challenged(error, path, code) from None
        return principal

    def _is_ours(self, token: str | None) -> bool:
        return token is not None and (token.startswith(PREFIX) or self._is_bootstrap(token) or self._is_token(token))

    def _is_bootstrap(self, token: str) -> bool:
        shown = hashlib.sha256(token.encode()).digest()
        return self._bootstrap is not None and hmac.compare_digest(shown, self._bootstrap)

    def _is_token(self, token: str) -> bool:
        return self.tokens is not None and token.count(".") == 2 and len(token) <= _MOST_BYTES

    async def _identified(self, token: str) -> Principal:
        if self._is_bootstrap(token):
            return Principal(BOOTSTRAP, "MEGAMCP_API_KEY", Scope.ADMIN, DEFAULT_TENANT)
        if token.startswith(PREFIX):
            if (found := await self.keys.find(token)) is not None:
                return found
        elif self.tokens is not None and self._is_token(token):
            return await self.tokens.read(token)
        raise Unauthorized("The API key is wrong, revoked or expired.")

    def _challenged(self, error: MegaMCPError, path: str, code: str | None = None) -> MegaMCPError:
        error.challenge = self._challenge(path, code)
        return error

    def _challenge(self, path: str, error: str | None) -> str:
        """`WWW-Authenticate`, with where to find out who gives tokens (RFC 9728) if anyone does."""
        parts = [f'error="{error}"'] if error else []
        if self.tokens is not None:
            agents = path.startswith(("/r/", "/e/", "/mcp"))
            parts.append(f'resource_metadata="{self.base}{METADATA}{path if agents else ""}"')
            parts.append(f'scope="{SCOPE_PREFIX}{Scope.AGENT if agents else Scope.TRAINER}"')
        return f"Bearer {', '.join(parts)}".strip()

    # What routes of the control plane ask

    async def permit(self, request: Request) -> None:
        """The route's scope, and whose things its path and query name. Raises `Forbidden`, `NotFound`."""
        visit: Visit | None = request.scope.get(VISIT)
        asked = right(request.method, template(request.scope["route"]))
        if visit is not None:
            visit.deed, visit.target = asked.deed, "/".join(request.path_params.values()) or None
        principal = CALLER.get()
        if principal is None:
            return
        if principal.scope not in asked.scopes or (principal.rollout and "rollout" not in request.path_params):
            raise self._challenged(_not_for(principal), request.url.path, "insufficient_scope")
        if asked.call and visit is not None and principal.quotas.metered:
            self.meters.begin_call(principal)
            visit.calling = True
        if (rollout := request.path_params.get("rollout")) is not None:
            await self.see_rollout(rollout)
        if (checkpoint := request.path_params.get("checkpoint")) is not None:
            await self.see_checkpoint(checkpoint)
        for name in _POINTS:
            if (point := request.query_params.get(name)) is not None:
                await self.see_checkpoint(point)

    async def see_rollout(self, rollout: str) -> None:
        """Raises `NotFound` for a rollout that the caller may not know of."""
        if not _limited():
            return
        tenant, _ = await self._tenant(rollout, _TENANT)
        if tenant is None:
            raise no_rollout(rollout)
        demand_sight(rollout, tenant)

    async def see_checkpoint(self, point: str | None) -> None:
        """The same for a checkpoint, or `base` or `head`, which say nothing of others."""
        if point is None or point in _WHOLE or not _limited():
            return
        tenant, rollout = await self._tenant(point, _TENANT_OF_CHECKPOINT)
        caller = CALLER.get()
        assert caller is not None
        if tenant is None or not caller.sees(tenant) or caller.rollout not in (None, rollout):
            raise no_checkpoint(point)

    async def _tenant(self, name: str, query: str) -> tuple[str | None, str]:
        """Whose a rollout or checkpoint is: never another's later, so asked once."""
        if (known := self._tenants.get(name)) is not None:
            return known
        row = await self._store.row(query, name)
        if row is None:
            return None, name
        found = self._tenants[name] = row["tenant"], row.get("rollout", name)
        if len(self._tenants) > _REMEMBERED:
            self._tenants.popitem(last=False)
        return found

    def metadata(self, path: str) -> dict[str, Any] | None:
        """Protected-resource metadata (RFC 9728) of a path of the gateway, or of all of it; None without an issuer."""
        if self.tokens is None:
            return None
        return {
            "resource": f"{self.base}{path}",
            "authorization_servers": [self.tokens.issuer],
            "bearer_methods_supported": ["header"],
            "scopes_supported": [f"{SCOPE_PREFIX}{scope}" for scope in Scope],
            "resource_name": "MegaMCP",
        }


def _tokens(settings: Settings) -> "Tokens | None":
    if settings.jwt_issuer is None:
        return None
    from megamcp.access.tokens import Tokens  # here: a start without an issuer is quicker

    return Tokens(settings)


def _not_for(principal: Principal) -> Forbidden:
    return Forbidden(f"A key of scope {principal.scope} may not do this.", code="forbidden")


def _limited() -> bool:
    caller = CALLER.get()
    return caller is not None and (caller.scope is not Scope.ADMIN or caller.rollout is not None)


async def permitted(request: Request) -> None:
    """For routers: `Entrance.permit`."""
    entrance: Entrance = request.app.state.services.entrance
    await entrance.permit(request)


def template(route: Any) -> str:
    """A route's path as OpenAPI has it: without the kinds of its parameters."""
    path: str = route.path_format
    return path


def keys_wanted(settings: Settings) -> bool:
    """Whether strangers are kept out at all."""
    return settings.api_key is not None or settings.jwt_issuer is not None


def shown(scope: Asgi) -> str | None:
    """The token that a request shows."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bearer(value)
    return None


def _own_hosts(settings: Settings) -> frozenset[str]:
    own = {settings.host, urlsplit(settings.public_url or "").hostname or "", *settings.allowed_hosts}
    return frozenset({"localhost", *(name.lower() for name in own if name)})


@lru_cache(maxsize=256)
def host_allowed(value: bytes, names: frozenset[str]) -> bool:
    """An address is never what DNS rebinding comes with: that needs a name."""
    try:
        name = urlsplit(f"//{value.decode('ascii')}").hostname or ""
    except ValueError:
        return False
    if name in names or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
