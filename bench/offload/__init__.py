"""Out-of-core tuning on a CPU: files, AdamW, a streamed base, packed adapters, memory limits, plans."""
