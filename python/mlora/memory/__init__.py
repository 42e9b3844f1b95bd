"""How much memory is used, and the fitted model that predicts it."""
