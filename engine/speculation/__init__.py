"""Drafts: who proposes tokens, and what it is told of a step to do so."""
