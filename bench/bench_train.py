"""Measures training of several adapters together against PEFT one after the other; `--help` says more."""

from training.train import main

if __name__ == "__main__":
    raise SystemExit(main())
