-- Keys, and whose rollouts and environments are. What is shown for a key is not here, only its SHA-256.

create table megamcp.api_keys (
    id text primary key,
    name text not null,
    hash bytea not null,
    scope text not null check (scope in ('admin', 'trainer', 'agent', 'read-only')),
    tenant text not null,
    quotas jsonb not null default '{}',
    created_at timestamptz not null default clock_timestamp(),
    created_by text,
    expires_at timestamptz,
    revoked_at timestamptz              -- its row stays: audits name it
);

alter table megamcp.rollouts
    add tenant text not null default 'default',
    add key text;                       -- whose quota it counts for
create index on megamcp.rollouts (key) where status = 'open' and key is not null;
create index on megamcp.rollouts (tenant, created_at, id);

alter table megamcp.environments add tenant text;   -- null: everyone's
