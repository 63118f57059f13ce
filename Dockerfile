# The service, built in one stage and run from another that has neither the sources nor the build's tools.
# Any tag of the python image from 3.11 on will do; both stages must have the same.
ARG PYTHON_TAG=3.13-slim

FROM python:${PYTHON_TAG} AS builder
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python -m venv /opt/qkv
COPY constraints.txt ./
# torch first and by itself: by far the largest layer, and no change to the code rebuilds it.
# TORCH_INDEX is the package index to take it from (one with CPU builds, say); without it, pip's own.
ARG TORCH_INDEX
RUN /opt/qkv/bin/pip install -c constraints.txt --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY service service
# The two variables pin the build backend too (older pips read the one, newer ones the other).
RUN PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
    /opt/qkv/bin/pip install -c constraints.txt '.[server,tracing]'

FROM python:${PYTHON_TAG}
# tini: as process 1 the service would have to reap orphans and set up its own signals.
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*
# A name as well as a number, since torch asks who it runs as; home is the one place that can be written.
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin qkv
COPY --from=builder /opt/qkv /opt/qkv
ENV PATH=/opt/qkv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
# By number: Kubernetes can tell that it is not root only from a number.
USER 10001
EXPOSE 8000
# The empty ProxyHandler keeps a proxy that docker puts into the environment out of the way.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/readyz', timeout=4)"]
ENTRYPOINT ["tini", "--"]
CMD ["qkv", "serve", "--host", "0.0.0.0", "--port", "8000"]
