"""Whoever a request comes from, and what follows from that. Decides by what it is given; asks nobody.

`CALLER` is the request's principal: set at the door, read where rollouts are opened and environments looked up. None
stands for the gateway itself, for a gateway that wants no keys, and for an agent with nothing but its rollout's URL.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

from megamcp.errors import NotFound

DEFAULT_TENANT = "default"
"""Of what was opened by nobody in particular."""
SCOPE_PREFIX = "megamcp:"
"""Before a scope, in a token."""


class Scope(StrEnum):
    """What a key is for. `rights` has what each may do."""

    ADMIN = "admin"
    """All, in every tenant."""
    TRAINER = "trainer"
    """Rollouts and checkpoints of its tenant, and all that can be done with them."""
    AGENT = "agent"
    """Tools of its tenant's rollouts, and nothing around them."""
    READ_ONLY = "read-only"
    """To look at its tenant's rollouts."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """What a key may use; None for as much as it wants. Live rollouts are counted in the database, the rest by each
    gateway process for itself."""

    rollouts: int | None = None
    calls_per_s: float | None = None
    concurrent_calls: int | None = None
    bytes_per_day: int | None = None

    @property
    def metered(self) -> bool:
        """Whether a process has to count."""
        return (self.calls_per_s, self.concurrent_calls, self.bytes_per_day) != (None, None, None)


NO_QUOTAS = Quotas()


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request comes from. `id` is the key's, or says which token's subject it is.

    `rollout` and `path` are all that a token may be good for: one rollout, one path of the gateway.
    """

    id: str
    name: str
    scope: Scope
    tenant: str
    quotas: Quotas = NO_QUOTAS
    rollout: str | None = None
    path: str | None = None

    def sees(self, tenant: str | None) -> bool:
        """Whether what is a tenant's (None: everyone's) is there at all for this one."""
        return self.scope is Scope.ADMIN or tenant is None or tenant == self.tenant


CALLER: ContextVar[Principal | None] = ContextVar("megamcp_caller", default=None)


def owner() -> tuple[str, str | None]:
    """(tenant, key) of what the caller opens."""
    caller = CALLER.get()
    return (DEFAULT_TENANT, None) if caller is None else (caller.tenant, caller.id)


def visible(tenant: str | None) -> bool:
    """Whether the caller sees what is this tenant's."""
    caller = CALLER.get()
    return caller is None or caller.sees(tenant)


def listed_tenant() -> str | None:
    """The tenant whose rollouts a list has; None for those of all."""
    caller = CALLER.get()
    return None if caller is None or caller.scope is Scope.ADMIN else caller.tenant


def demand_sight(rollout: str, tenant: str) -> None:
    """Raises `NotFound` for a rollout of another tenant, in the words for one that isn't there."""
    caller = CALLER.get()
    if caller is not None and not (caller.sees(tenant) and caller.rollout in (None, rollout)):
        raise NotFound(f"There is no rollout {rollout[:80]}.", code="rollout_not_found")
