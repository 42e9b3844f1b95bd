"""Trains when `bench_offload.py` tells it to; see `offload/worker.py`."""

from offload.worker import main

if __name__ == "__main__":
    main()
