"""The operator: its schema in PyTorch, autograd, and an oracle in plain PyTorch."""
