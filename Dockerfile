# An image with coterie for the sites and the server of a deployment (compose.yaml of `coterie deploy init`):
#
#     docker build -t coterie .
#     COTERIE_IMAGE=coterie docker compose up
#
# What can be changed: --build-arg EXTRAS=report,ui, TORCH, TORCH_INDEX (the CPU build by default), and UID, which must be
# the owner of the folder that compose.yaml mounts, because its keys are private.
FROM python:3.11-slim AS built
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=flower,report,ui
RUN python -m venv /opt/coterie
ENV PATH=/opt/coterie/bin:$PATH
COPY constraints.txt /src/
RUN pip install --no-cache-dir -c /src/constraints.txt "$TORCH" --extra-index-url "$TORCH_INDEX"
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[$EXTRAS]"

FROM python:3.11-slim
# A compiler for the fastest plan on CPUs; without it, coterie uses its other plans.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=built /opt/coterie /opt/coterie
ENV PATH=/opt/coterie/bin:$PATH OMP_WAIT_POLICY=passive
ARG UID=1000
RUN useradd --create-home --uid "$UID" coterie && install -d -o coterie /app
USER coterie
WORKDIR /app
CMD ["coterie", "--help"]
