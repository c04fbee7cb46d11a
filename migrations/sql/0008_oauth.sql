-- What the gateway has to show at tool servers that want authorization. Both columns `sealed` are encrypted by a key that is
-- not in the database (see megamcp/oauth/vault.py). An environment's versions share a grant: it is its name's.

create table megamcp.oauth_grants (
    environment text not null,
    server text not null,
    resource text not null,             -- the server's URL: another one is another server
    sealed bytea not null,
    updated_at timestamptz not null default clock_timestamp(),
    primary key (environment, server, resource)
);

-- Consents that somebody was asked for, by SHA-256 of their `state`. Gone once it came back, whatever it came back with.
create table megamcp.oauth_consents (
    state bytea primary key,
    environment text not null,
    server text not null,
    resource text not null,
    sealed bytea not null,
    expires_at timestamptz not null
);
create index on megamcp.oauth_consents (environment, server, resource);
create index on megamcp.oauth_consents (expires_at);
