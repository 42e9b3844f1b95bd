"""The files of a run: its folder, checkpoints, plots."""
