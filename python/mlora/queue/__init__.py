"""What users ask of a run at work, and what it tells them."""
