# Serves a model on port 8000. Build: docker build -t anydecode .
# Run: docker run --rm -p 127.0.0.1:8000:8000 -e ANYDECODE_API_KEYS=KEY -v anydecode-models:/models anydecode
FROM python:3.12-slim-bookworm AS build
# Packages are not pinned: the mirrors delete an exact version when a fix replaces it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python -m venv /opt/anydecode \
    && /opt/anydecode/bin/pip install --no-cache-dir ".[telemetry]"

FROM python:3.12-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 anydecode \
    && mkdir /models \
    && chown anydecode /models
COPY --from=build /opt/anydecode /opt/anydecode
ENV PATH=/opt/anydecode/bin:$PATH \
    XDG_CACHE_HOME=/models \
    HF_HOME=/models/huggingface \
    PYTHONUNBUFFERED=1
USER 1000
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["anydecode", "serve"]
CMD ["smollm2-135m-instruct", "--host", "0.0.0.0"]
