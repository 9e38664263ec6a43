"""What tests and benches use, and a running worker does not.

A simulated cluster with a faulty network, for the transfer protocol: see `world.py`. And workers without an engine in processes of
their own, which are killed and stopped in the middle of real transfers: see `endings.py`, `child.py` (the parent's end of a process)
and `link_process.py` (the process). `tiny_models.py` makes models with random weights for real engines.
"""
