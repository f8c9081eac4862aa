"""Carrying segments and messages between processes; deciding nothing."""
