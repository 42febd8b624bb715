# Trainer and rollout server on NVIDIA GPUs. Build: docker build -t moe-replay .   Run: docker compose up
# CUDA as in the wheels of torch that vLLM 0.32 requires. devel: kernels of vLLM are compiled when they are first used.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

ARG EXTRAS=train,serve,vllm,lora,report,tensorboard
# The image has no tags to take it from: docker build --build-arg VERSION=0.2.0
ARG VERSION=0.1.0.dev0

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PATH=/venv/bin:$PATH \
    HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv build-essential curl \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
RUN python3 -m venv /venv \
    && printf 'Metadata-Version: 2.4\nName: moe-replay\nVersion: %s\n' "$VERSION" > PKG-INFO \
    && pip install --upgrade pip \
    && pip install ".[$EXTRAS]"

WORKDIR /run/moe-replay
ENTRYPOINT ["moe-replay"]
CMD ["--help"]
