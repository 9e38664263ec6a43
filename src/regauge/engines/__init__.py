"""Adapters that hand an engine's KV pool and page tables to `move`."""
