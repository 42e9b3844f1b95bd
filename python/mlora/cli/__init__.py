"""The command line: options, exit codes and tables; no logic."""
