"""Entry point of ``python -m mlora`` and ``mlora``."""

from mlora.cluster.imports import end_imports_at_once


def main() -> None:
    """Runs the command line. Ctrl-C ends it with one line of text, also during its imports."""
    end_imports_at_once()
    from mlora.cli.app import main

    main()


if __name__ == "__main__":
    main()
