"""PEFT folders, Trainer, merging."""
