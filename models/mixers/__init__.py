"""Sequence and channel mixers, each defined once and shared by every model type that has it."""
