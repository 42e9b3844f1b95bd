"""A training step on the engine: rows packed and carried through the stages, optimizers, memory."""
