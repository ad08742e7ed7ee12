# Lowbit RL Bench on NVIDIA GPUs: vLLM and verl in the versions of requirements/lock-gpu.txt. From the repository's root:
#   docker build -f docker/gpu.Dockerfile --build-arg COMMIT="$(git rev-parse HEAD)" -t lowbit-gpu .
#   docker run --rm --gpus all --ipc host -v "$PWD/results:/lowbit/results" lowbit-gpu doctor
# CUDA 13.0, as the pinned wheels of torch and vLLM are built; with its compiler, for kernels that are made at run time.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libnuma1 make python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 lowbit \
    && mkdir /lowbit \
    && chown lowbit /lowbit

USER 1001
WORKDIR /lowbit
COPY --chown=1001 . .
ARG EXTRAS=dev,gpu
RUN make setup EXTRAS="$EXTRAS" PYTHON=python3.12 && .venv/bin/python -m pip cache purge

# The image has no git history: runs record this commit.
ARG COMMIT=""
ENV LOWBIT_COMMIT=$COMMIT PATH=/lowbit/.venv/bin:$PATH
ENTRYPOINT ["lowbit"]
CMD ["--help"]
