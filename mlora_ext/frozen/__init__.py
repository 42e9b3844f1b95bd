"""What multiplies by a frozen weight."""
