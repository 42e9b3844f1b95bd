"""Measures pipelines against torch's own, FSDP2 and tensor parallelism; `--help` says more."""

from pipeline.command import main

if __name__ == "__main__":
    raise SystemExit(main())
