"""Before a run: dry runs, profiles, the partition into stages, the memory budget."""
