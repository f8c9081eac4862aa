"""Composes a deployment from its components; watches contracts, serves metrics."""
