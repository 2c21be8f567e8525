# An image with Ray, PyTorch and Paceline for all nodes of a cluster; docs/recipes.md has the commands.
FROM python:3.11-slim

# The package index that has the build of PyTorch, for CPUs or one CUDA. Empty: pip's own index.
ARG TORCH_INDEX=""
# The version of Paceline; the context has no git, which would tell it.
ARG VERSION=""

# Pods and volumes refer to the user by its number.
RUN useradd --create-home --uid 1000 paceline

# The versions that the tests use. PyTorch comes first, so that nothing else chooses a build of it.
WORKDIR /src
COPY .ci/constraints.txt .ci/constraints.txt
RUN pip install --no-cache-dir -c .ci/constraints.txt \
    ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch

COPY . .
RUN ${VERSION:+env SETUPTOOLS_SCM_PRETEND_VERSION="$VERSION"} \
    pip install --no-cache-dir -c .ci/constraints.txt '.[ray]'

ENV RAY_USAGE_STATS_ENABLED=0
USER 1000
# Your script goes here.
WORKDIR /app
CMD ["paceline", "doctor"]
