# docker build -t cadence .
# docker run --rm -v "$PWD:/work" cadence python train.py
#
# For CUDA 13: docker build --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cu130 -t cadence .
# and docker run --gpus all --shm-size 8g ... (loader workers pass batches through shared memory).
FROM python:3.11-slim

ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu

# torch alone first: its layer is kept when Cadence changes.
COPY constraints.txt /src/
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX_URL" --constraint /src/constraints.txt torch

COPY pyproject.toml README.md LICENSE /src/
COPY trainer /src/trainer
COPY callbacks /src/callbacks
COPY trackers /src/trackers
RUN pip install --no-cache-dir --constraint /src/constraints.txt /src && rm -r /src

# Not /src: Python would import the folders there.
WORKDIR /work
CMD ["trainer", "env"]
