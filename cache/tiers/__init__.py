"""Colder tiers: what the device's pools cannot hold is kept in host memory and on disk, and comes back on a match."""
