"""What adapters are trained for: losses over rows."""
