"""What becomes of a run's adapters: exported, merged, evaluated."""
