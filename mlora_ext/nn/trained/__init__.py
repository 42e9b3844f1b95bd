"""Parts of the base that adapters train values of their own of: copies, heads, rows of tokens."""
