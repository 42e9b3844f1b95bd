"""Computes what the CUDA launches cost, without a GPU; `--help` says more."""

from gpu.budget_report import main

if __name__ == "__main__":
    raise SystemExit(main())
