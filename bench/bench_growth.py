"""Measures how a step of training grows with adapters and with layers; `--help` says more."""

from training.growth import main

if __name__ == "__main__":
    raise SystemExit(main())
