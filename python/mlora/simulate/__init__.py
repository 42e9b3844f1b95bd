"""The pipeline simulator: workloads, closed forms, forecasts, traces."""
