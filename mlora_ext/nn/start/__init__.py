"""Initial values that depend on an adapter's data: EVA, CorDA, LoRA-GA."""
