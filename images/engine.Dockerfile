# docker build -f images/engine.Dockerfile -t penstock/engine:0.1.0 .
FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS build
RUN pip install --no-cache-dir uv==0.13.8
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never
# The CPU operations, for every instruction set of this architecture.
RUN apt-get update && apt-get install --yes --no-install-recommends g++=4:12.2.0-3
COPY . /src
WORKDIR /src
RUN images/install engine /opt/penstock
# Kernels for a GPU that is not here: a replica of such a shape never waits for a compiler. WARM= builds without.
ARG WARM="llama-3.1-8b qwen3-0.6b qwen3-8b qwen3-14b"
ARG ARCH=sm_90
RUN mkdir -p /opt/triton && for shape in $WARM; do \
    /opt/penstock/bin/penstock warm benchmarks/shapes/$shape --arch $ARCH --cache /opt/triton --dtype bfloat16; done

FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
LABEL org.opencontainers.image.title="penstock-engine" org.opencontainers.image.licenses="Apache-2.0"
# Triton compiles a small C file for each kernel that it launches.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=65532 --group=65532 /home/penstock
COPY --from=build /opt/penstock /opt/penstock
COPY --from=build --chown=65532:65532 /opt/triton /home/penstock/.triton/cache
# So that examples/tiny.yaml runs on a new cluster without a download.
COPY --from=build --chown=65532:65532 /src/examples /home/penstock/examples
ENV PATH=/opt/penstock/bin:$PATH HOME=/home/penstock PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /home/penstock
USER 65532:65532
ENTRYPOINT ["penstock"]
CMD ["serve"]
