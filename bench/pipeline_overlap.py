"""Trains with two stages on one device and traces how copies and kernels overlap; `--help` says more."""

from gpu.pipeline_overlap import main

if __name__ == "__main__":
    raise SystemExit(main())
