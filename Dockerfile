# Serves a bundle: docker build -t fedloom . && docker run -p 127.0.0.1:8470:8470 -v "$PWD/digits.fedloom:/bundle:ro" fedloom
# TLS is left to what stands before it, hence --insecure: publish the port on loopback, or behind a proxy, only.
# Another build of torch than the usual one (for CPUs it is much smaller): --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt ".[serve]" && useradd --system fedloom
USER fedloom
ENV OMP_NUM_THREADS=1
EXPOSE 8470
HEALTHCHECK CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8470/healthz', timeout=3)"]
ENTRYPOINT ["fedloom", "serve", "/bundle", "--host", "0.0.0.0", "--insecure"]
