"""Tasks, groups of tasks, and their results."""
