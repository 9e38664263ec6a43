"""A simulated cluster with a faulty network, for the transfer protocol: see `world.py`. Not used by a running worker."""
