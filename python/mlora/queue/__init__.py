"""What users ask of a run at work, and what the run tells them."""
