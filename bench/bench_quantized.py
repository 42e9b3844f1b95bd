"""Measures training over a 4-bit base against PEFT's QLoRA in the same run; `--help` says more."""

from training.quantized import main

if __name__ == "__main__":
    raise SystemExit(main())
