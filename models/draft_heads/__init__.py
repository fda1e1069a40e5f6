"""Draft heads: the multi-token-prediction blocks that ship with a checkpoint, and the reading of their weights."""
