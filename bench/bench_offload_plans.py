"""Predicts a step with the plans of other out-of-core systems; `--help` says more."""

from offload.plans import main

if __name__ == "__main__":
    raise SystemExit(main())
