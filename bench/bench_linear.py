"""Measures one linear layer with several adapters against the layer without any; `--help` says more."""

from linear.command import main

if __name__ == "__main__":
    raise SystemExit(main())
