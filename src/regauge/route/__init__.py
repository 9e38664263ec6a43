"""Which workers a request goes to, whether it is admitted, and what becomes of it when one is lost. Pure; see docs/routing.md."""
