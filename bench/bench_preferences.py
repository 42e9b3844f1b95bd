"""Measures four DPO adapters in one run against TRL one after the other; `--help` says more."""

from training.preferences import main

if __name__ == "__main__":
    raise SystemExit(main())
