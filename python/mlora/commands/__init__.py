"""The commands of `mlora`, but for those that train."""
