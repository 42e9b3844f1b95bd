"""Routes: which rows of a forward pass belong to which adapter."""
