"""Times every CUDA launch of a layer on the GPU that is there; `--help` says more."""

from gpu.launches import main

if __name__ == "__main__":
    raise SystemExit(main())
