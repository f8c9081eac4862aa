"""Carries segments and messages between processes; makes no decisions."""
