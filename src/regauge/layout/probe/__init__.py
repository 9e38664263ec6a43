"""Declared is not enough: a layout is held against bytes that an engine wrote, or found from them. No I/O."""
