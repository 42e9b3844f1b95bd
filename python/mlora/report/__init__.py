"""One self-contained HTML page about a run, made from the files of its folder."""
