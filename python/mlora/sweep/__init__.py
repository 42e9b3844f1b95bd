"""Searches for the best hyperparameters: trials are adapters in one batch, proposed and pruned by Optuna."""
