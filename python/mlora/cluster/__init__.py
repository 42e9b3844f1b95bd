"""The processes of a run: how they start, their devices, heartbeats and the watchdog."""
