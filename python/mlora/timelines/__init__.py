"""Timelines of pipelines: forecast, recorded, drawn."""
