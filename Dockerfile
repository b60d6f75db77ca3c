# Serves a model on port 8000. Build: docker build -t anydecode .
# Fetch the model, once: docker run --rm -v anydecode-models:/models --entrypoint anydecode \
#   anydecode pull smollm2-135m-instruct
# Run: docker run --rm --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
#   -p 127.0.0.1:8000:8000 -e ANYDECODE_API_KEYS=KEY -v anydecode-models:/models anydecode
#
# The base is pinned by the digest of its index of platforms. `docker buildx imagetools inspect
# python:3.12-slim-bookworm` prints the newest one.
FROM python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579 AS base

FROM base AS build
WORKDIR /source
COPY requirements.lock requirements-build.lock ./
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes -r requirements-build.lock \
    && python -m venv /opt/anydecode \
    && /opt/anydecode/bin/pip install --no-cache-dir --require-hashes -r requirements.lock
COPY . .
# The wheel of a release: its kernels are compiled by the pinned ziglang package.
RUN ANYDECODE_BUILD=always \
    ANYDECODE_PLATFORM="manylinux_2_17_$(uname -m).manylinux2014_$(uname -m)" \
    /opt/build/bin/python -m build --wheel --no-isolation --outdir /wheels \
    && /opt/anydecode/bin/pip install --no-cache-dir --no-deps /wheels/*.whl

FROM base
RUN useradd --create-home --uid 1000 anydecode \
    && mkdir /models \
    && chown anydecode /models
COPY --from=build /opt/anydecode /opt/anydecode
# Everything that is written goes below /models.
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
