"""The planner of out-of-core tuning: pure data and pure functions, without torch."""
