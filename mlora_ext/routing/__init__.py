"""Which rows belong to which adapter: routes, and where samples lie."""
