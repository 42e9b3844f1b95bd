"""``python -m mlora`` and ``mlora``: the command line."""

from mlora.cluster.imports import end_imports_at_once


def main() -> None:
    """Run the command line; Ctrl-C ends it in one line even while its imports are under way."""
    end_imports_at_once()
    from mlora.cli.app import main

    main()


if __name__ == "__main__":
    main()
