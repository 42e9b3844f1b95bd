"""Simulates pipelines of many devices; nothing here is measured."""
