"""PEFT and Transformers: adapter folders, PEFT models, the adapter interface, merging."""
