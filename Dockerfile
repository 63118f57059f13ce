# The image of the service. One stage builds it; the final stage has no sources and no build tools.
# PYTHON_TAG is any tag of the python image from 3.11 on; both stages use the same one.
ARG PYTHON_TAG=3.13-slim

FROM python:${PYTHON_TAG} AS builder
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python -m venv /opt/qkv
COPY constraints.txt ./
# torch has its own layer, by far the largest one, so that a change of the code does not rebuild it.
# TORCH_INDEX is the package index for torch, such as one with CPU builds. Default: pip's own.
ARG TORCH_INDEX
RUN /opt/qkv/bin/pip install -c constraints.txt --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY service service
# Older pips read PIP_CONSTRAINT, newer ones PIP_BUILD_CONSTRAINT; both pin the build backend too.
RUN PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
    /opt/qkv/bin/pip install -c constraints.txt '.[server,tracing]'

FROM python:${PYTHON_TAG}
# tini is process 1: it reaps orphans and forwards signals, so that the service need not.
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*
# torch looks up the name of its user, so the user needs a name. Its home is the only writable folder.
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin qkv
COPY --from=builder /opt/qkv /opt/qkv
ENV PATH=/opt/qkv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
# A number: Kubernetes can verify only a numeric user as not root.
USER 10001
EXPOSE 8000
# The empty ProxyHandler ignores a proxy that docker sets in the environment.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/readyz', timeout=4)"]
ENTRYPOINT ["tini", "--"]
CMD ["qkv", "serve", "--host", "0.0.0.0", "--port", "8000"]
