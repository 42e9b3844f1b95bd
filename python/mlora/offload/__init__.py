"""Out-of-core tuning: models larger than a device's memory, or than the host's."""
