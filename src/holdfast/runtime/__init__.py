"""Composes a deployment from its parts; watches contracts, serves metrics."""
