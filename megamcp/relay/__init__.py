"""The pausing relay: PostgreSQL's protocol between clients that stay and databases that move.

A client logs in here as to any PostgreSQL (SCRAM-SHA-256, protocol 3.0 to 3.2) and reaches the database that its login
leads to at the moment. Around each transaction the relay calls `megamcp.enter` and `megamcp.leave` on the backend:
`enter` takes a lock shared, and whoever wants to checkpoint, clone, rename or drop the database takes it exclusively
and may then end the backends. Clients whose transaction is over don't notice: the relay asks `resolve` again, connects
to what it says, and sets the session up as it was. `memory` lists what is taken along and what isn't.

Promised: nothing of a transaction is sent twice, and none of it before `enter` has answered; an answer that a client
got is the backend's own; a backend that ends within a transaction is told to the client (57P01), which then decides; a
client reaches the route of its login and cancels its own queries only.

Not done: TLS (it is declined), replication, pooling (each client has a backend of its own), retrying of transactions,
parsing of SQL.
"""

from megamcp.relay.backend import Resolve, Route
from megamcp.relay.relay import Relay

__all__ = ["Relay", "Resolve", "Route"]
