"""The tasks of a run: who there is, who runs, and what was decided about it."""
