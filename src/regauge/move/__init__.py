"""Runs a plan: kernels, transports and the transfer protocol."""
