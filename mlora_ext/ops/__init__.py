"""The operator in PyTorch: functions, autograd, segments, dropout, and a plain PyTorch oracle."""
