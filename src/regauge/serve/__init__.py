"""Gateway, worker processes and their supervisor."""
