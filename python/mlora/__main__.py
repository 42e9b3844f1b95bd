"""``python -m mlora``: the command line."""

from mlora.cli import main

if __name__ == "__main__":
    main()
