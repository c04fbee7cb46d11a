-- State kind `document`: one JSON document a rollout and server. What is kept of one is its packed content (MessagePack)
-- and the splices that calls have made since. A rollout without a row stands where its checkpoint does.

create sequence megamcp.document_seq as bigint start 1;    -- versions: never used twice, also by calls that were undone

-- Contents that stand still, each once, by SHA-256.
create table megamcp.document_blobs (
    hash bytea primary key,
    content bytea not null,
    created_at timestamptz not null default clock_timestamp()
);

-- What an environment's document starts as, from the first call on that any rollout of it makes.
create table megamcp.document_bases (
    environment integer not null references megamcp.environments on delete cascade,
    server text not null,
    version bigint not null,
    hash bytea not null references megamcp.document_blobs,
    digest text,                        -- of the canonical form; null until somebody had to know
    primary key (environment, server)
);

-- What a checkpoint keeps of a server's document. No row: as the environment starts.
create table megamcp.document_points (
    checkpoint text not null references megamcp.checkpoints on delete cascade,
    server text not null,
    version bigint not null,
    hash bytea not null references megamcp.document_blobs,
    digest text not null,
    primary key (checkpoint, server)
);
create index on megamcp.document_points (hash);

-- Heads that were written to since their checkpoint. The content is a blob or the rollout's own.
create table megamcp.documents (
    rollout text not null,
    server text not null,
    version bigint not null,
    hash bytea references megamcp.document_blobs,
    content bytea,
    deltas integer not null default 0,
    delta_bytes bigint not null default 0,
    primary key (rollout, server),
    check ((hash is null) <> (content is null))
) with (fillfactor = 70);
create index on megamcp.documents (hash) where hash is not null;

-- One call's change: at `position`, `removed` bytes make way for `added`.
create table megamcp.document_deltas (
    rollout text not null,
    server text not null,
    version bigint not null,
    position integer not null,
    removed integer not null,
    added bytea not null,
    primary key (rollout, server, version)
);

do $$
begin
    alter table megamcp.document_blobs alter column content set compression lz4;
    alter table megamcp.documents alter column content set compression lz4;
    alter table megamcp.document_deltas alter column added set compression lz4;
exception when feature_not_supported or invalid_parameter_value then null;  -- PostgreSQL was built without it
end $$;
