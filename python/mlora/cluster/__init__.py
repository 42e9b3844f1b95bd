"""Processes: which there are, how they start, their devices, heartbeats and the watchdog."""
