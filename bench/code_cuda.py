"""Lists registers, memory and matrix instructions of the compiled CUDA kernels; `--help` says more."""

from gpu.code_cuda import main

if __name__ == "__main__":
    raise SystemExit(main())
