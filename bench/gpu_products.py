"""Checks and times the product with the low-rank part inside, beside the vendor's; `--help` says more."""

from gpu.products import main

if __name__ == "__main__":
    raise SystemExit(main())
