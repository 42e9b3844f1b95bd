# An image for NVIDIA GPUs (and CPUs): docker build -t mlora .
#   docker run --gpus all -v "$PWD:/work" mlora train run.yaml
# The CUDA toolkit stays in the first stage. Not built or run yet: see docs/install.md.
ARG CUDA=13.0.2

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/mlora
ENV PATH=/opt/mlora/bin:$PATH
RUN pip install --no-cache-dir torch==2.13.0
RUN pip install --no-cache-dir 'setuptools>=77' wheel 'cmake>=3.25' ninja 'pybind11>=2.13'
COPY . /src
RUN pip install --no-cache-dir --no-build-isolation '/src[quantization]' \
    && pip uninstall -y cmake ninja pybind11

# torch's wheel brings the CUDA libraries, so the driver of the host and this are all that it needs
FROM ubuntu:24.04
# Triton compiles a small launcher with the C compiler when it first runs a kernel
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/mlora /opt/mlora
ENV PATH=/opt/mlora/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
ENTRYPOINT ["mlora"]
CMD ["--help"]
