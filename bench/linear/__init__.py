"""Measures one linear layer with adapters; `microbench` shares its contenders, oracle and limits."""
