# The gateway, its bundled tool servers and the keeper of sandboxes: one image, for `compose.yaml` or by itself.
#
#   docker build -t megamcp .
#
# Where images or packages come from elsewhere, the build arguments say so: PYTHON_IMAGE, and pip's own variables.
ARG PYTHON_IMAGE=python:3.13-slim

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
ARG PIP_TRUSTED_HOST
RUN python3 -m venv /opt/megamcp
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
# By themselves, so that a change of the source leaves this layer as it is.
RUN python3 -c "import tomllib; told = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*told['dependencies'], *told['optional-dependencies']['docker'], sep='\n')" > /tmp/requirements.txt \
 && /opt/megamcp/bin/python -m pip install --no-cache-dir --disable-pip-version-check -r /tmp/requirements.txt
COPY migrations migrations
COPY sandboxes sandboxes
COPY tool_servers tool_servers
COPY megamcp megamcp
RUN /opt/megamcp/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps .

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 megamcp && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/megamcp megamcp \
 && install -d -o megamcp -g megamcp -m 0750 /var/lib/megamcp \
 && install -d -o root -g megamcp -m 0750 /run/megamcp
COPY --from=build /opt/megamcp /opt/megamcp
ENV PATH=/opt/megamcp/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MEGAMCP_DATA_DIR=/var/lib/megamcp \
    MEGAMCP_HOST=0.0.0.0
USER megamcp
WORKDIR /var/lib/megamcp
EXPOSE 8600
HEALTHCHECK --interval=5s --timeout=5s --start-period=90s --retries=3 \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8600/readyz', timeout=4)"]
CMD ["megamcp", "serve"]
