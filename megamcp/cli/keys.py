"""`megamcp key …`"""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megamcp.cli import show
from megamcp.cli.output import Output, talks_to_gateway

if TYPE_CHECKING:
    from megamcp.client import Client

app = typer.Typer(no_args_is_help=True, help="Keys: who may do what (for admins).")


@app.command()
@talks_to_gateway
async def create(
    client: "Client",
    out: Output,
    name: Annotated[str, typer.Argument(help="Whose it is; the audit log says it.")],
    scope: Annotated[
        Literal["admin", "trainer", "agent", "read-only"], typer.Option("--scope", help="What it may do.")
    ],
    tenant: Annotated[str, typer.Option("--tenant", help="Whose rollouts it sees and opens.")] = "default",
    ttl: Annotated[
        float | None, typer.Option("--ttl", help="Seconds until it ends. Omitted: when it is revoked.")
    ] = None,
    rollouts: Annotated[int | None, typer.Option("--rollouts", min=0, help="Most rollouts open at once.")] = None,
    calls_per_s: Annotated[float | None, typer.Option("--calls-per-s", help="Most calls a second.")] = None,
    concurrent_calls: Annotated[
        int | None, typer.Option("--concurrent-calls", min=1, help="Most calls at once.")
    ] = None,
    bytes_per_day: Annotated[
        int | None, typer.Option("--bytes-per-day", min=1, help="Most bytes of requests and answers a day.")
    ] = None,
) -> None:
    """Make a key. It is shown this once, on stdout."""
    made = await client.create_key(
        name,
        scope,
        tenant=tenant,
        ttl_s=ttl,
        rollouts=rollouts,
        calls_per_s=calls_per_s,
        concurrent_calls=concurrent_calls,
        bytes_per_day=bytes_per_day,
    )
    if not out.as_json:
        out.errors.print(f"Key {made.id}. Keep it now: it is shown this once.", markup=False)
    out.answer(made, made.secret)


@app.command("list")
@talks_to_gateway
async def list_(client: "Client", out: Output) -> None:
    """List all keys, without what is shown for them."""
    found = await client.keys()
    out.answer({"keys": found}, lambda: show.keys(found))


@app.command()
@talks_to_gateway
async def revoke(
    client: "Client", out: Output, key: Annotated[str, typer.Argument(help="A key's id.", metavar="KEY")]
) -> None:
    """Revoke a key: every gateway refuses it within two seconds."""
    await client.revoke_key(key)
    out.answer({"revoked": key}, f"Key {key} is revoked.")
