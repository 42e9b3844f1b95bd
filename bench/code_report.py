"""Lists what the compilers made of the Triton and CUDA kernels; `--help` says more."""

from gpu.code_report import main

if __name__ == "__main__":
    raise SystemExit(main())
