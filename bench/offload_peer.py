"""Trains by another library when `bench_offload.py` tells it to; see `offload/peers.py`."""

from offload.peers import main

if __name__ == "__main__":
    main()
