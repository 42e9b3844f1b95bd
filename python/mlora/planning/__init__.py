"""Before a run: profiles of stages, the partition into stages, the memory that tasks need."""
