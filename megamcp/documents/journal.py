"""Every query on the tables of documents, each with a name and a sentence (those of calls: `sql/documents.sql`)."""

# What an environment's document starts as, where its definition says so.
SET_BASE = """insert into megamcp.document_bases (environment, server, version, hash)
    values ($1, $2, nextval('megamcp.document_seq'), megamcp.document_keep($3))"""

# The base of an environment's document; no row where no call has made it yet.
BASE = """select b.version, b.hash, b.digest from megamcp.document_bases b
    where b.environment = $1 and b.server = $2"""

BASE_CONTENT = """select c.content from megamcp.document_bases b join megamcp.document_blobs c on c.hash = b.hash
    where b.environment = $1 and b.server = $2"""

# A base's digest, once somebody had to know it.
SET_BASE_DIGEST = "update megamcp.document_bases set digest = $3 where environment = $1 and server = $2"

# Documents that a rollout has written to since its checkpoint.
WRITTEN = """select d.server, d.version, d.hash, coalesce(d.content, b.content) as content, d.deltas
    from megamcp.documents d left join megamcp.document_blobs b on b.hash = d.hash
    where d.rollout = $1 and ($2::text is null or d.server = $2)"""

DELTAS = """select position, removed, added from megamcp.document_deltas
    where rollout = $1 and server = $2 order by version"""

# What a checkpoint keeps, of one server or of all.
POINTS = """select p.server, p.version, p.hash, p.digest from megamcp.document_points p
    where p.checkpoint = $1 and ($2::text is null or p.server = $2)"""

CONTENT = "select content from megamcp.document_blobs where hash = $1"

# Whether a content is there and will not be taken away before this transaction points at it.
KEPT = """select 1 from megamcp.document_blobs
    where hash = $1 and created_at > clock_timestamp() - interval '1 minute'"""
KEEP = """insert into megamcp.document_blobs as b (hash, content) values ($1, $2)
    on conflict (hash) do update set created_at = excluded.created_at"""

# A checkpoint keeps what its parent kept, but for what was written since.
KEEP_POINTS = """insert into megamcp.document_points (checkpoint, server, version, hash, digest)
    select $1, x.server, x.version, x.hash, x.digest
      from unnest($2::text[], $3::bigint[], $4::bytea[], $5::text[]) as x(server, version, hash, digest)"""

# The rollout stands where its checkpoint does: nothing of its own is left.
FORGET = """with deltas as (delete from megamcp.document_deltas where rollout = $1)
    delete from megamcp.documents where rollout = $1"""

# Points of checkpoints that nothing stands on and nobody can come back to.
DROP_POINTS = "delete from megamcp.document_points p using megamcp.checkpoints c where c.id = p.checkpoint and c.void"

# Contents that nothing points at. Young ones may be about to be: whoever wrote them has not committed yet.
DROP_BLOBS = """delete from megamcp.document_blobs b using (
    select x.hash from megamcp.document_blobs x
     where x.created_at < clock_timestamp() - $1::interval
       and not exists (select 1 from megamcp.document_points p where p.hash = x.hash)
       and not exists (select 1 from megamcp.documents d where d.hash = x.hash)
       and not exists (select 1 from megamcp.document_bases s where s.hash = x.hash)
     limit $2 for update skip locked) s
    where s.hash = b.hash"""
